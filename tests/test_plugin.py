"""The plugin's footing: settings, the import hook, and that it never raises into the host."""

from __future__ import annotations

import importlib
import logging
import sys
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType

import pytest

from vllm_topkx import plugin
from vllm_topkx.ops.errors import TopkxError
from vllm_topkx.plugin.import_hook import when_imported
from vllm_topkx.settings import Settings


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of a package with a module ``inner`` that is not imported yet."""
    name = f"topkx_host_{tmp_path.name.replace('-', '_')}"
    package = tmp_path / name
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "inner.py").write_text("VALUE = 1\ndef f():\n    return VALUE\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    return name


def refuse(what: str, error: Exception) -> None:
    raise AssertionError(f"{what}: {error}")


def test_a_module_is_patched_when_it_is_imported_and_once(host: str) -> None:
    seen: list[int] = []

    def patch(module: ModuleType) -> None:
        seen.append(module.VALUE)
        module.VALUE = 2

    for _ in range(3):
        when_imported(f"{host}.inner", patch, refuse)
    assert f"{host}.inner" not in sys.modules and host not in sys.modules
    inner = importlib.import_module(f"{host}.inner")
    when_imported(f"{host}.inner", patch, refuse)
    assert inner.f() == 2
    assert seen == [1]
    assert inner.__loader__ is inner.__spec__.loader
    assert type(inner.__loader__).__name__ == "SourceFileLoader"


def test_a_module_that_is_there_already_is_patched_at_once(host: str) -> None:
    inner = importlib.import_module(f"{host}.inner")
    when_imported(f"{host}.inner", lambda module: setattr(module, "VALUE", 3), refuse)
    assert inner.f() == 3


def test_a_patch_that_fails_is_reported_and_the_import_succeeds(host: str) -> None:
    told: list[tuple[str, Exception]] = []
    when_imported(f"{host}.inner", lambda module: module.gone, lambda *what: told.append(what))
    assert importlib.import_module(f"{host}.inner").f() == 1
    ((name, error),) = told
    assert name == f"{host}.inner" and isinstance(error, AttributeError)


def test_the_entry_point_is_found() -> None:
    (point,) = entry_points(group="vllm.general_plugins", name="topkx")
    assert point.load() is plugin.register


def test_register_is_off_when_told_and_a_bad_setting_is_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(plugin, "when_imported", lambda name, patch, on_error: calls.append(name))
    monkeypatch.setenv("VLLM_TOPKX", "0")
    plugin.register()
    assert calls == []
    monkeypatch.setenv("VLLM_TOPKX", "yes")
    with caplog.at_level(logging.WARNING, logger="vllm.topkx"):
        plugin.register()
    (record,) = caplog.records
    assert "VLLM_TOPKX='yes': allowed is 0, 1 or shadow" in record.getMessage()
    assert calls == []
    monkeypatch.setenv("VLLM_TOPKX", "1")
    plugin.register()
    assert calls == [module for module, _ in plugin.PATCHES]


def test_settings_have_defaults_and_are_read_from_the_environment() -> None:
    assert Settings.from_env({}) == Settings("1", 256, 10.0, None)
    env = {
        "VLLM_TOPKX_MAX_ROWS": "64",
        "VLLM_TOPKX_TIMEOUT_S": "0.5",
        "VLLM_TOPKX_LOCAL_TOPK": "640",
        "VLLM_TOPKX": "0",
    }
    assert Settings.from_env(env) == Settings("0", 64, 0.5, 640)
    assert Settings.from_env({"VLLM_TOPKX": "shadow"}).mode == "shadow"


@pytest.mark.parametrize(
    "name, value, allowed",
    [
        ("VLLM_TOPKX", "2", "allowed is 0, 1 or shadow"),
        ("VLLM_TOPKX_MAX_ROWS", "0", "a whole number of at least 1"),
        ("VLLM_TOPKX_MAX_ROWS", "many", "a whole number of at least 1"),
        ("VLLM_TOPKX_TIMEOUT_S", "0", "a number of at least 0.001"),
        ("VLLM_TOPKX_TIMEOUT_S", "nan", "a number of at least 0.001"),
        ("VLLM_TOPKX_TIMEOUT_S", "inf", "a number of at least 0.001"),
        ("VLLM_TOPKX_LOCAL_TOPK", "-1", "a whole number of at least 0"),
    ],
)
def test_a_bad_setting_is_refused_by_name(name: str, value: str, allowed: str) -> None:
    with pytest.raises(TopkxError) as refused:
        Settings.from_env({name: value})
    assert f"{name}={value!r}" in str(refused.value) and allowed in str(refused.value)
