"""What a pass rewrites, and what it leaves as it is: counted, and each reason said once."""

from __future__ import annotations

import logging
from collections import Counter

from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass

log = logging.getLogger("vllm_topkx.fx_passes")

#: What was logged in this process, as the node's name and the reason.
_logged: set[tuple[str, str]] = set()


class LeftAlone(Exception):
    """Why a match is not rewritten."""


def require(condition: object, reason: str) -> None:
    """Raises :class:`LeftAlone` with ``reason`` unless ``condition`` holds."""
    if not condition:
        raise LeftAlone(reason)


class RewritingPass(CustomGraphPass):
    """A pass that counts what it does.

    Attributes:
        rewritten: matches rewritten so far.
        left_alone: matches left alone so far, by reason.
    """

    #: What is said of a match that is left alone, with its node's name and the reason.
    LEFT_ALONE: str

    def __init__(self) -> None:
        self.rewritten = 0
        self.left_alone: Counter[str] = Counter()

    def leave_alone(self, node: fx.Node, reason: str, level: int = logging.WARNING) -> None:
        """Counts a match that is left alone, and logs it once a process."""
        self.left_alone[reason] += 1
        if log.isEnabledFor(level) and (node.name, reason) not in _logged:
            _logged.add((node.name, reason))
            log.log(level, self.LEFT_ALONE, node.name, reason)
