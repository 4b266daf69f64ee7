"""Layouts, exchange and the ``topkx::`` operators. Importing this registers the operators."""

from . import definitions  # noqa: F401  (registers the operators)
from .errors import BackendUnavailableError, ExchangeTimeoutError, TopkxError
from .exchange import TopkExchange, release_all, reserve
from .groups import add_group_resolver
from .layouts import default_local_topk, exchange_bytes, ll_offset, ll_pairs, packed_row_words, rescue_slots

__all__ = [
    "BackendUnavailableError",
    "ExchangeTimeoutError",
    "TopkExchange",
    "TopkxError",
    "add_group_resolver",
    "default_local_topk",
    "exchange_bytes",
    "ll_offset",
    "ll_pairs",
    "packed_row_words",
    "release_all",
    "rescue_slots",
    "reserve",
]
