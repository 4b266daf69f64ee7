"""``vllm-topkx compat``: what the plugin hooks into, in any vLLM's source, as a table."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..ops.errors import TopkxError
from .vllm_hooks import HOOKS, Finding, check_hooks, installed_root

_EPILOG = """\
SOURCE is a release (its wheel is downloaded with pip and deleted again), a wheel, or a
folder: of the package vllm, or one that has it. vLLM is not imported: only its Python
files are read. Without SOURCE: the installed vLLM. Prints Markdown; exit code 0 when
everything is there, else 1.

example:
  vllm-topkx compat 0.26.0 0.33.0
"""
CELLS = {True: "yes", False: "**no**", None: "-"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    parser.add_argument("sources", metavar="SOURCE", nargs="*", help="a release, a wheel or a folder")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    found: dict[str, list[Finding]] = {}
    for source in args.sources or [None]:
        with _package(source) as root:
            found[_version(root)] = check_hooks(root)
    if args.json:
        print(json.dumps({v: [finding.as_dict() for finding in findings] for v, findings in found.items()}, indent=2))
    else:
        print(as_markdown(found))
    return 0 if all(finding.holds is not False for findings in found.values() for finding in findings) else 1


def as_markdown(found: dict[str, list[Finding]]) -> str:
    """A row a hook, a column a version; below, why a hook does not hold."""
    rows = [["hook", *found, "lost without it"], ["---"] * (len(found) + 2)]
    for i, hook in enumerate(HOOKS):
        rows.append([hook.name, *(CELLS[findings[i].holds] for findings in found.values()), hook.lost])
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    problems = [
        f"- {version}, {finding.hook.name}: {finding.reason}"
        for version, findings in found.items()
        for finding in findings
        if finding.holds is False
    ]
    return "\n".join([*lines, "", *problems]).rstrip()


@contextmanager
def _package(source: str | None) -> Iterator[Path]:
    """The folder of the package ``vllm`` of ``source``; what was downloaded or unpacked for it is gone afterwards."""
    if source is None:
        root = installed_root()
        if root is None:
            raise TopkxError("vLLM is not installed: name a release, a wheel or a folder")
        yield root
    elif Path(source).is_dir():
        yield _in_folder(Path(source))
    else:
        with tempfile.TemporaryDirectory(prefix="vllm-topkx-compat-") as folder:
            downloaded = None if source.endswith(".whl") else _download(source, Path(folder))
            _unpack(downloaded or Path(source), Path(folder))
            if downloaded:
                downloaded.unlink()
            yield _in_folder(Path(folder))


def _in_folder(folder: Path) -> Path:
    for root in (folder / "vllm", folder):
        if (root / "__init__.py").is_file():
            return root
    raise TopkxError(f"{folder}: there is no package vllm")


def _download(release: str, folder: Path) -> Path:
    if not re.fullmatch(r"\d+(\.\w+)+", release):
        raise TopkxError(f"{release}: no such file or folder, and no release number such as 0.33.0")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    done = subprocess.run([*command, "--dest", str(folder), f"vllm=={release}"], stdout=sys.stderr)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        raise TopkxError(f"pip cannot download vllm {release}")
    return wheels[0]


def _unpack(wheel: Path, folder: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder, [name for name in archive.namelist() if name.endswith(".py")])
    except zipfile.BadZipFile:
        raise TopkxError(f"{wheel}: not a wheel") from None


def _version(root: Path) -> str:
    """What ``_version.py`` says, or the folder's name."""
    try:
        found = re.search(r"^__version__\b.*=\s*['\"]([^'\"]+)", (root / "_version.py").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else str(root)
