"""The exact global top-K of sparse attention under decode context parallelism, as one exchange."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from .fx_passes import compile_options

__all__ = [
    "BackendUnavailableError",
    "ExchangeTimeoutError",
    "TopkExchange",
    "TopkxError",
    "__version__",
    "compile_options",
    "default_local_topk",
    "packed_row_words",
    "release_all",
    "reserve",
]


def __getattr__(name: str) -> Any:
    # The passes import Inductor, which most users of the ops never need.
    if name == "compile_options":
        from .fx_passes import compile_options

        return compile_options
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
