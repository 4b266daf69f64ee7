"""Every environment variable of the package, read and checked in one place.

====================== ======= ===================================================================
``VLLM_TOPKX``         ``1``   ``0``: off, vLLM's own path everywhere; ``1``: on; ``shadow``: both
                               for each merge of vLLM's, whose result is served, and differences
                               are counted (docs/vllm.md)
``VLLM_TOPKX_MAX_ROWS``  256   most query rows an exchange is reserved for; calls of more rows take
                               the all-gather form
``VLLM_TOPKX_TIMEOUT_S``  10   seconds to wait for a peer before ``ExchangeTimeoutError``
``VLLM_TOPKX_LOCAL_TOPK``      candidates each rank sends in round 1; default: chosen from K and W
====================== ======= ===================================================================
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from .ops.errors import TopkxError

MODES = ("0", "1", "shadow")
VARIABLES = ("VLLM_TOPKX", "VLLM_TOPKX_MAX_ROWS", "VLLM_TOPKX_TIMEOUT_S", "VLLM_TOPKX_LOCAL_TOPK")


@dataclass(frozen=True)
class Settings:
    """The values of the variables above."""

    mode: str = "1"
    max_rows: int = 256
    timeout_s: float = 10.0
    local_topk: int | None = None

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> Settings:
        """Reads the variables; refuses values that are not allowed, by name."""
        env = os.environ if env is None else env
        mode = env.get("VLLM_TOPKX", cls.mode)
        if mode not in MODES:
            raise TopkxError(f"VLLM_TOPKX={mode!r}: allowed is {', '.join(MODES[:-1])} or {MODES[-1]}")
        local_topk = _number(env, "VLLM_TOPKX_LOCAL_TOPK", 0, int, minimum=0)
        return cls(
            mode=mode,
            max_rows=int(_number(env, "VLLM_TOPKX_MAX_ROWS", cls.max_rows, int, minimum=1)),
            timeout_s=_number(env, "VLLM_TOPKX_TIMEOUT_S", cls.timeout_s, float, minimum=0.001),
            local_topk=int(local_topk) or None,
        )


def _number(env: Mapping[str, str], name: str, default: float, kind: type, minimum: float) -> float:
    text = env.get(name, "")
    if not text:
        return default
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not minimum <= value < float("inf"):
        what = "a whole number" if kind is int else "a number"
        raise TopkxError(f"{name}={text!r}: must be {what} of at least {minimum:g}")
    return value
