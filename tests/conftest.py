"""Shared fixtures: one pool of 16 rank processes for the whole session."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

# `python -m pytest` puts the checkout on the path, where the package lies in pieces: test the installed one.
sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != Path(__file__).parent.parent]

# Where CuTe DSL leaves the PTX that it is told to keep. It reads the variable once, when it is imported; its default
# is the current folder.
_KEPT = TemporaryDirectory(prefix="topkx-ptx-")
os.environ["CUTE_DSL_DUMP_DIR"] = _KEPT.name

import pytest
from merging import release

from vllm_topkx.ranks import RankPool


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """16 gloo ranks with groups of 2 to 16; ``pool.run(f, *args, world_size=W)`` runs on the first W."""
    with RankPool(16, group_sizes=range(2, 17)) as ranks:
        yield ranks


@pytest.fixture
def ranks(pool: RankPool) -> Iterator[RankPool]:
    """The pool without exchanges of other tests, which may use the same names with other settings."""
    pool.run(release)
    yield pool
    pool.run(release)
