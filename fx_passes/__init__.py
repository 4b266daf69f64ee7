"""FX passes: what they match and write is stated in ``docs/passes.md``."""

from .exchange_merge import ExchangeMergePass
from .indexer import IndexerPass
from .options import PassSequence, aot_eager, compile_options

__all__ = ["ExchangeMergePass", "IndexerPass", "PassSequence", "aot_eager", "compile_options"]
