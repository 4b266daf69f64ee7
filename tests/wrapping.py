"""Graphs as text that fits into a source file."""

import textwrap
from collections.abc import Iterable


def wrapped(lines: Iterable[str]) -> str:
    """``lines``, the long ones wrapped."""
    return "\n".join(part for line in lines for part in textwrap.wrap(line, 110, subsequent_indent="     "))
