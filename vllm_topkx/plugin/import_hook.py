"""Runs a function on a module right after it is imported, now or later."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

Patch = Callable[[ModuleType], None]
OnError = Callable[[str, Exception], None]

_done: set[tuple[int, Patch]] = set()


def when_imported(name: str, patch: Patch, on_error: OnError) -> None:
    """Calls ``patch(module)`` once for the module ``name``: at once when it is imported already.

    ``on_error(name, error)`` is told when ``patch`` raises; the import itself always succeeds.
    """
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    finder = next(finder for finder in sys.meta_path if isinstance(finder, _Finder))
    finder.wanted.setdefault(name, {})[patch] = on_error
    module = sys.modules.get(name)
    # A module that is still being imported is patched by the finder or, without it, by a later call.
    if module is not None and not getattr(module.__spec__, "_initializing", False):
        _apply(module, {patch: on_error})


def _apply(module: ModuleType, patches: dict[Patch, OnError]) -> None:
    for patch, on_error in patches.items():
        if (id(module), patch) in _done:
            continue
        _done.add((id(module), patch))
        try:
            patch(module)
        except Exception as error:
            on_error(module.__name__, error)


class _Finder(importlib.abc.MetaPathFinder):
    """Lets the other finders find a module, and wraps its loader."""

    def __init__(self) -> None:
        self.wanted: dict[str, dict[Patch, OnError]] = {}
        self._searching: set[str] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self.wanted or name in self._searching:
            return None
        self._searching.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._searching.discard(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _PatchingLoader(spec.loader, self.wanted[name])
        return spec


class _PatchingLoader(importlib.abc.Loader):
    """The module's own loader, and the patches after it."""

    def __init__(self, loader: importlib.abc.Loader, patches: dict[Patch, OnError]) -> None:
        self._loader, self._patches = loader, patches

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # The module keeps its own loader: inspect, pickle and resources ask it.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _apply(module, self._patches)
