"""FX passes: what they match and write is stated in ``docs/passes.md``."""

from .exchange_merge import ExchangeMergePass
from .options import PassSequence, aot_eager, compile_options

__all__ = ["ExchangeMergePass", "PassSequence", "aot_eager", "compile_options"]
