"""What a package's source says, without importing it."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef


class NotFoundInSource(Exception):
    """What was looked for is not there; the message says what, and where."""


class SourceTree:
    """The modules of a package, each parsed once. Whatever is not there raises :class:`NotFoundInSource`.

    Args:
        root: the package's folder; paths of modules are relative to it.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._parsed = functools.cache(self._parse)
        self._files = functools.cache(lambda: sorted(root.rglob("*.py")))

    def has(self, path: str) -> bool:
        return (self.root / path).is_file()

    def module(self, path: str) -> ast.Module:
        return self._parsed(path)

    def _parse(self, path: str) -> ast.Module:
        try:
            return ast.parse((self.root / path).read_bytes())
        except OSError:
            raise NotFoundInSource(f"there is no {path}") from None
        except (SyntaxError, ValueError):
            raise NotFoundInSource(f"{path} is not Python that this interpreter knows") from None

    def function(self, path: str, name: str, owner: str | None = None) -> Function:
        """The function ``name`` of a module, or of its class ``owner``."""
        body = self.module(path).body if owner is None else self.class_(path, owner).body
        where = path if owner is None else f"{owner} in {path}"
        return _find(body, Function, name, f"{where} has no {'function' if owner is None else 'method'} {name}")

    def class_(self, path: str, name: str) -> ast.ClassDef:
        return _find(self.module(path).body, ast.ClassDef, name, f"{path} has no class {name}")

    def needs_names(self, path: str, *names: str) -> None:
        """Raises unless the module binds ``names``: defines, imports or assigns them."""
        _need(names, set(_bound(self.module(path).body)), path)

    def needs_attributes(self, path: str, owner: str, *names: str) -> None:
        """Raises unless the class has ``names``: fields, methods, properties, or what a method assigns to self."""
        class_ = self.class_(path, owner)
        found = set(_bound(class_.body))
        for node in ast.walk(class_):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_name(node.value, "self"):
                found.add(node.attr)
        _need(names, found, f"{owner} in {path}")

    def importers(self, name: str) -> list[str]:
        """The modules that import ``name`` from another, sorted."""
        with_it = (file for file in self._files() if name.encode() in file.read_bytes())
        paths = [file.relative_to(self.root).as_posix() for file in with_it]
        return [path for path in paths if name in _imported(self.module(path))]


def parameters(function: Function) -> tuple[str, ...]:
    """The names of its parameters in order, ``*`` and ``**`` before those that take the rest."""
    a = function.args
    names = [argument.arg for argument in (*a.posonlyargs, *a.args)]
    names += [f"*{a.vararg.arg}"] if a.vararg else []
    names += [argument.arg for argument in a.kwonlyargs]
    return (*names, *([f"**{a.kwarg.arg}"] if a.kwarg else []))


def mentions(node: ast.AST, name: str) -> bool:
    """Whether the code of ``node`` uses ``name`` as a variable or an attribute."""
    return any(_is_name(n, name) or (isinstance(n, ast.Attribute) and n.attr == name) for n in ast.walk(node))


def calls(node: ast.AST, name: str) -> bool:
    """Whether the code of ``node`` calls ``name(...)``."""
    return any(isinstance(n, ast.Call) and _is_name(n.func, name) for n in ast.walk(node))


def has_string(node: ast.AST, text: str) -> bool:
    return any(isinstance(n, ast.Constant) and n.value == text for n in ast.walk(node))


def _find(body: list[ast.stmt], kind: type, name: str, otherwise: str):
    # The last definition of a name is the one that counts.
    found = [node for node in _statements(body) if isinstance(node, kind) and node.name == name]
    if not found:
        raise NotFoundInSource(otherwise)
    return found[-1]


def _need(names: Iterable[str], found: set[str], where: str) -> None:
    missing = [name for name in names if name not in found]
    if missing:
        raise NotFoundInSource(f"{where} has no {', '.join(missing)}")


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Those of ``body``, and of the branches in it: what runs when a module or a class is made."""
    for node in body:
        yield node
        for part in ("body", "orelse", "finalbody"):
            if not isinstance(node, (Function, ast.ClassDef)):
                yield from _statements(getattr(node, part, []))
        for handler in getattr(node, "handlers", []):
            yield from _statements(handler.body)


def _bound(body: list[ast.stmt]) -> Iterator[str]:
    for node in _statements(body):
        if isinstance(node, (Function, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name))


def _imported(module: ast.Module) -> set[str]:
    return {alias.name for node in ast.walk(module) if isinstance(node, ast.ImportFrom) for alias in node.names}


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name
