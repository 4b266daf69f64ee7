"""What a compiled graph depends on beside its inputs: part of Inductor's cache key."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

from .. import settings
from .._version import __version__
from ..ops import definitions
from ..ops.exchange import reserved


@functools.cache
def _source_hash() -> str:
    """Of the passes, of the ops that they call, and of the plugin, which defines one of these and splits at it."""
    folders = (Path(__file__).parent, Path(definitions.__file__).parent, Path(settings.__file__).parent / "plugin")
    hasher = hashlib.sha256()
    for path in sorted(path for folder in folders for path in folder.glob("*.py")):
        hasher.update(path.name.encode() + b"\0" + path.read_bytes())
    return hasher.hexdigest()


def pass_uuid(name: str, *options: object) -> str:
    """Identifies the pass ``name`` with ``options``: code, settings and the exchanges that are reserved now.

    Without the exchanges, a cached graph that was compiled before a ``reserve()`` would be used after it.
    """
    state = (name, __version__, _source_hash(), options, settings.Settings.from_env(), reserved())
    return hashlib.sha256(repr(state).encode()).hexdigest()
