"""The wheel, and what importing the package costs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent


def python(code: str, **env: str) -> str:
    """Output of ``code`` in a fresh interpreter outside the checkout."""
    run = [sys.executable, "-c", code]
    result = subprocess.run(run, cwd="/", env={**os.environ, **env}, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_wheel_holds_all_packages_and_works(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    source = tmp_path / "source"  # a build writes into the tree it builds
    files = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    for name in files.stdout.splitlines():
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path, source], check=True)
    (wheel,) = tmp_path.glob("vllm_topkx-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    modules = {n for n in names if n.endswith(".py")}
    for folder, package in (
        ("vllm_topkx", "vllm_topkx"),
        ("ops", "vllm_topkx/ops"),
        ("fx_passes", "vllm_topkx/fx_passes"),
    ):
        for path in (source / folder).rglob("*.py"):
            assert f"{package}/{path.relative_to(source / folder)}" in modules
    assert any(n.endswith("LICENSE") for n in names)
    target = tmp_path / "target"
    subprocess.run([*pip, "install", "--no-deps", "--target", target, wheel], check=True)
    found = python(
        "import vllm_topkx, vllm_topkx.ops, vllm_topkx.fx_passes as p; print(vllm_topkx.__file__, p.__file__)",
        PYTHONPATH=str(target),
    )
    assert found.split() == [str(target / "vllm_topkx" / f) for f in ("__init__.py", "fx_passes/__init__.py")]


def test_importing_is_cheap_and_brings_neither_vllm_nor_cutlass() -> None:
    # CPU seconds: other tests run beside this one.
    modules, seconds = python(
        "import torch, sys, time; t = time.process_time(); import vllm_topkx; t = time.process_time() - t\n"
        "print(*(m for m in ('vllm', 'cutlass', 'rich', 'matplotlib') if m in sys.modules), ';', t)"
    ).split(";")
    assert modules.strip() == ""
    assert float(seconds) < 0.5


def test_nothing_but_the_plugin_and_its_tests_imports_vllm() -> None:
    importing = re.compile(r"^\s*(import vllm\b(?!_)|from vllm[.\s])", re.MULTILINE)
    found = {
        str(path.relative_to(ROOT))
        for folder in ("vllm_topkx", "ops", "fx_passes")
        for path in (ROOT / folder).rglob("*.py")
        if importing.search(path.read_text())
    }
    assert {f for f in found if not f.startswith("vllm_topkx/")} == set()
