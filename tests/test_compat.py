"""The hooks into vLLM, as they are read from source: synthetic packages, wheels of them, and the installed vLLM."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from vllm_topkx import plugin
from vllm_topkx.cli import compat, doctor, main, vllm_hooks
from vllm_topkx.plugin import merge

MERGE = f"""
from vllm.distributed import get_dcp_group
def {merge.FUNCTION}({", ".join(merge.PARAMETERS)}=None): ...
def sparse_attn_indexer(q, dcp_world_size=1):
    if q:
        {merge.FUNCTION}()
direct_register_custom_op(op_name="sparse_attn_indexer", op_func=sparse_attn_indexer)
class SparseAttnIndexer:
    def __init__(self, topk_tokens, max_model_len):
        self.topk_tokens, self.max_model_len = topk_tokens, max_model_len
"""
KPOOL = f"""
from vllm.distributed import get_dcp_group
from ...sparse_attn_indexer import {merge.FUNCTION}
class SparseAttnIndexerKpool:
    def __init__(self):
        self.topk_tokens = self.max_pool_len = 1
"""
#: A package in which all hooks hold.
PACKAGE = {
    "__init__.py": "raise ImportError",
    "_version.py": "__version__ = version = '7.8.9'",
    "plugins/__init__.py": 'GROUP = "vllm.general_plugins"\ndef load_general_plugins(): ...',
    "v1/worker/worker_base.py": "def init(self): load_general_plugins()",
    "v1/worker/ubatching.py": "def dbo_current_ubatch_id(): ...",
    vllm_hooks.INDEXER: MERGE,
    vllm_hooks.KPOOL: KPOOL,
    "models/eager.py": "from indexer import SparseAttnIndexer, sparse_attn_indexer\nx = SparseAttnIndexer()",
    vllm_hooks.CONFIG: "class VllmConfig:\n    model_config = parallel_config = scheduler_config = None\n"
    "def get_current_vllm_config(): ...",
    vllm_hooks.PARALLEL: "class ParallelConfig:\n    decode_context_parallel_size: int = 1\n"
    "    cp_kv_cache_interleave_size: int = 1\n    @property\n    def use_ubatching(self): ...\n"
    "    @property\n    def num_ubatches(self): ...",
    vllm_hooks.SCHEDULER: "class SchedulerConfig:\n    max_num_batched_tokens: int",
    vllm_hooks.GROUPS: "_groups: dict = {}\ndef get_dcp_group(): ...\nclass GroupCoordinator:\n    rank_in_group: int\n"
    "    def __init__(self):\n        self.unique_name = self.cpu_group = self.device_group = None\n"
    "        if True:\n            self.device = None\n    def all_gather(self): ...",
    "envs.py": "if True:\n    environment_variables: dict = {}\n"
    "def compile_factors():\n    return [name for name in environment_variables]",
    vllm_hooks.BACKENDS: "from .rules import inductor_partition_rule_context\n"
    "def split_graph(graph, splitting_ops): ...\nclass VllmBackend:\n    def __call__(self, graph): ...\n"
    "    def configure_post_pass(self): self.pass_manager.configure()",
    vllm_hooks.PASS_MANAGER: "class PostGradPassManager:\n    def add(self, pass_): ...",
    vllm_hooks.INDUCTOR_PASS: "class PassContext:\n    def __init__(self, compile_range):\n"
    "        self.compile_range = compile_range\ndef get_pass_context(): ...\nclass InductorPass: ...",
    vllm_hooks.COMPILATION: 'class CompilationConfig:\n    ops = ["vllm::sparse_attn_indexer"]',
}


def write(folder: Path, changes: dict[str, str | None]) -> Path:
    """The package in ``folder``, with ``changes``; None leaves a file out."""
    for path, text in {**PACKAGE, **changes}.items():
        if text is not None:
            file = folder / "vllm" / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
    return folder / "vllm"


def edit(path: str, old: str, new: str) -> dict[str, str]:
    assert old in PACKAGE[path]
    return {path: PACKAGE[path].replace(old, new)}


def failing(root: Path) -> dict[str, str]:
    """What does not hold: its reason by what is lost and the name of the hook."""
    return {finding.hook.name: finding.reason for finding in vllm_hooks.check_hooks(root) if finding.holds is False}


def test_all_hooks_hold_in_a_package_that_has_them(tmp_path: Path) -> None:
    assert failing(write(tmp_path, {})) == {}
    assert all(finding.holds for finding in vllm_hooks.check_hooks(tmp_path / "vllm"))


B, G, X, P = vllm_hooks.BACKENDS, vllm_hooks.GROUPS, vllm_hooks.INDEXER, vllm_hooks.PARALLEL


@pytest.mark.parametrize(
    ("changes", "hook", "reason"),
    [
        (edit("plugins/__init__.py", "vllm.general", "vllm.special"), "plugins are", "does not name the group"),
        (edit("v1/worker/worker_base.py", "load_general", "load_special"), "plugins are", "does not call load_general"),
        (edit(X, "dcp_rank, ", "rank, "), "_merge_dcp", "other parameters than are known: logits, topk_indices, topk_"),
        (edit(X, "row_starts=None", "row_starts=None, **more"), "_merge_dcp", "row_starts, **more"),
        (edit(X, "        _merge_dcp_topk_global()", "        pass"), "_merge_dcp", "does not call _merge_dcp"),
        (edit(X, "import get_dcp_group", "import other"), "SparseAttnIndexer", "has no get_dcp_group"),
        (edit(X, "class SparseAttnIndexer", "class Other"), "SparseAttnIndexer", "has no class SparseAttnIndexer"),
        (edit(X, "self.max_model_len = topk", "self.longest = topk"), "SparseAttnIndexer", "has no max_model_len"),
        ({"models/eager.py": "from a import sparse_attn_indexer"}, "SparseAttnIndexer", "eager.py calls sparse_attn"),
        (edit(P, "num_ubatches", "ubatches"), "configuration", "ParallelConfig in config/parallel.py has no num_uba"),
        ({vllm_hooks.SCHEDULER: None}, "configuration", "there is no config/scheduler.py"),
        (edit(G, "self.device = ", "device = "), "coordinator", "GroupCoordinator in distributed/parallel_state.py"),
        (edit(G, "_groups: ", "groups: "), "coordinator", "has no _groups"),
        ({"v1/worker/ubatching.py": "x = 1"}, "micro-batch", "has no function dbo_current_ubatch_id"),
        (edit(vllm_hooks.KPOOL, "max_pool_len", "pools"), "kpool", "has no max_pool_len"),
        ({vllm_hooks.KPOOL: "class SparseAttnIndexerKpool: ..."}, "kpool", "does not import _merge_dcp_topk_global"),
        ({"models/new.py": f"from x import {merge.FUNCTION} as f"}, "no other importer", "known: models/new.py"),
        ({"envs.py": "def compile_factors(): ..."}, "cache keys", "has no environment_variables"),
        (edit("envs.py", "in environment_variables", "in ()"), "cache keys", "does not go by"),
        (edit(B, "configure_post_pass", "configure"), "post-grad", "VllmBackend in compilation/backends.py has no m"),
        (edit(B, "class VllmBackend", "class Other"), "post-grad", "has no class VllmBackend"),
        (edit(X, "dcp_world_size=1", "ranks=1"), "vllm::sparse", "sparse_attn_indexer.py has no dcp_world_size"),
        (edit(B, "graph, splitting_ops", "graph, ops, more"), "splitting", "split_graph in compilation/backends.py ha"),
        ({vllm_hooks.COMPILATION: "x = 1"}, "splitting", "does not split at vllm::sparse_attn_indexer"),
        ({B: "not python ("}, "post-grad", "is not Python"),
    ],
)  # fmt: skip
def test_a_hook_that_does_not_hold(tmp_path: Path, changes: dict[str, str | None], hook: str, reason: str) -> None:
    (found,) = [text for name, text in failing(write(tmp_path, changes)).items() if hook in name]
    assert reason in found


def test_a_vllm_without_kpool_lacks_nothing(tmp_path: Path) -> None:
    found = vllm_hooks.check_hooks(write(tmp_path, {vllm_hooks.KPOOL: None}))
    assert [finding.hook.name for finding in found if not finding.holds] == ["kpool indexer of GLM-5.x"]
    assert all(finding.holds is not False for finding in found)


def test_every_module_that_the_plugin_patches_is_looked_into(tmp_path: Path) -> None:
    for module in dict(plugin.PATCHES):
        path = module.removeprefix("vllm.").replace(".", "/") + ".py"
        folder = tmp_path / path.replace("/", "_")
        # Without the indexer's variant nothing is lost; an empty one is as bad as any.
        assert failing(write(folder, {path: ""})), path


# The command


def cells(line: str) -> list[str]:
    """Of a line of a Markdown table."""
    return [cell.strip() for cell in line.split("|")[1:-1]]


def make_wheel(folder: Path) -> Path:
    wheel = folder / "vllm-7.8.9-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in PACKAGE.items():
            archive.writestr(f"vllm/{path}", text)
        archive.writestr("vllm/_C.so", b"\0" * 1000)
    return wheel


def test_a_table_of_folders_and_wheels(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    write(tmp_path / "bad", {**edit(G, "_groups: ", "groups: "), vllm_hooks.KPOOL: None, "_version.py": None})
    wheel = make_wheel(tmp_path)
    bad = tmp_path / "bad" / "vllm"
    assert main(["compat", str(bad), str(wheel)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"| hook | {bad} | 7.8.9 | lost without it |"
    rows = {
        cells[1].strip(): [cell.strip() for cell in cells[2:4]] for cells in (line.split("|") for line in lines[2:-2])
    }
    assert list(rows) == [hook.name for hook in vllm_hooks.HOOKS]
    assert rows.pop("the DCP group's coordinator") == ["**no**", "yes"]
    assert rows.pop("kpool indexer of GLM-5.x") == ["-", "yes"]
    assert set(map(tuple, rows.values())) == {("yes", "yes")}
    assert lines[-1] == f"- {bad}, the DCP group's coordinator: {G} has no _groups"
    assert main(["compat", "--json", str(wheel)]) == 0
    assert [hook["holds"] for hook in json.loads(capsys.readouterr().out)["7.8.9"]] == [True] * len(vllm_hooks.HOOKS)


def test_a_release_is_downloaded_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    asked = []

    def download(command: list[str], **options: object) -> subprocess.CompletedProcess:
        asked.append(command[-1])
        folder = Path(command[command.index("--dest") + 1])
        if command[-1] == "vllm==7.8.9":
            make_wheel(folder)
        return subprocess.CompletedProcess(command, 0 if len(asked) == 1 else 1)

    monkeypatch.setattr(compat.subprocess, "run", download)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    assert main(["compat", "7.8.9"]) == 0
    assert capsys.readouterr().out.startswith("| hook | 7.8.9 |")
    assert main(["compat", "7.9.0"]) == 2
    assert capsys.readouterr().err == "vllm-topkx compat: pip cannot download vllm 7.9.0\n"
    assert asked == ["vllm==7.8.9", "vllm==7.9.0"] and not list((tmp_path / "tmp").iterdir())


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("nowhere", "no such file or folder, and no release number"),
        ("1.2; rm -rf /", "no such file or folder, and no release number"),
        ("missing.whl", "No such file"),
        ("broken.whl", "not a wheel"),
        ("empty", "there is no package vllm"),
    ],
)
def test_sources_that_are_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, source: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken.whl").write_text("x")
    Path("empty").mkdir()
    assert main(["compat", source]) == 2
    assert said in capsys.readouterr().err


# In doctor, and in the installed vLLM


def test_doctor_takes_over_nothing_where_a_vital_hook_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, edit(X, "dcp_rank, ", "rank, "))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    vllm = doctor.examine()["vllm"]
    assert not vllm["plugin"]["available"]
    (bad,) = [hook for hook in vllm["hooks"] if hook["holds"] is False]
    assert "other parameters" in bad["reason"] and bad["lost"] == vllm_hooks.EVERYTHING


@pytest.mark.vllm
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_the_installed_vllm_is_as_the_docs_say() -> None:
    """docs/compat.md has a row a hook, and for the version that tests run on what is found in it."""
    findings = vllm_hooks.check_hooks(vllm_hooks.installed_root())
    text = (Path(__file__).parent.parent / "docs" / "compat.md").read_text()
    head, _, *rows = [cells(line) for line in text.splitlines() if line.startswith("| ")]
    column = head.index("0.33.0")
    assert [(row[0], row[column], row[-1]) for row in rows] == [
        (f.hook.name, compat.CELLS[f.holds], f.hook.lost) for f in findings
    ]
    assert all(finding.holds for finding in findings)
