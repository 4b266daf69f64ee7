"""``topkx::sparse_attn_indexer``: vLLM's indexer op under this package's name, as the installed vLLM has it."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from ..ops.errors import TopkxError
from .merge import FUNCTION, original_of

NAME = "sparse_attn_indexer"
_library: torch.library.Library | None = None


def define_op(module: ModuleType) -> None:
    """Defines the op by the one that ``module`` (:data:`.merge.SOURCE`) registered: schema, mutations, tags, fake.

    It calls the function that vLLM's op calls, and with it the merge that :mod:`.merge` put there: compiled and
    eager models have one code path. Going by vLLM's op instead would cost its dispatch again, in every layer.
    Where the merge is still vLLM's, there is no op, and graphs stay as they are.

    Raises:
        TopkxError: the installed op is not that function.
    """
    global _library
    if _library is not None or original_of(getattr(module, FUNCTION, None)) is None:
        return
    installed = getattr(torch.ops.vllm, NAME, None)
    if installed is None or not hasattr(module, NAME):
        raise TopkxError(f"there is no {NAME} to define topkx::{NAME} by")
    installed = installed.default
    schema = _schema(installed, getattr(module, NAME))

    def run(*args: Any, **kwargs: Any) -> torch.Tensor:
        return getattr(module, NAME)(*args, **kwargs)

    library = torch.library.Library("topkx", "FRAGMENT")
    library.define(NAME + schema, tags=installed.tags)
    library.impl(NAME, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"topkx::{NAME}", installed, lib=library)
    _library = library


def _schema(installed: torch._ops.OpOverload, function: Any) -> str:
    """The arguments and returns of ``installed``, in a form that can be parsed.

    The text of its own schema cannot, where an argument is an opaque object (a layer's name); the function's
    annotations name its type.
    """
    arguments = installed._schema.arguments
    written = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    text = torch.library.infer_schema(function, mutates_args=written)
    parsed = torch._C.parse_schema(NAME + text)
    if _without_name(parsed) != _without_name(installed._schema):
        raise TopkxError(f"the schema of {installed} is not that of {function.__module__}.{NAME}")
    return text


def _without_name(schema: torch._C.FunctionSchema) -> str:
    return str(schema).partition("(")[2]
