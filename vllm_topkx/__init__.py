"""The exact global top-K of sparse attention under decode context parallelism, as one exchange."""

from ._version import __version__
from .ops import (
    BackendUnavailableError,
    ExchangeTimeoutError,
    TopkExchange,
    TopkxError,
    default_local_topk,
    packed_row_words,
    release_all,
    reserve,
)

__all__ = [
    "BackendUnavailableError",
    "ExchangeTimeoutError",
    "TopkExchange",
    "TopkxError",
    "__version__",
    "default_local_topk",
    "packed_row_words",
    "release_all",
    "reserve",
]
