"""The commands: exit codes, one-line refusals, output, and what they leave behind."""

from __future__ import annotations

import importlib.util
import json
import operator
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import fx

from vllm_topkx.cli import COMMANDS, main, verify
from vllm_topkx.cli.graph_text import graph_text
from vllm_topkx.cli.merge_dump import MergedDump
from vllm_topkx.ops.errors import ExchangeTimeoutError
from vllm_topkx.ops.reference import reference_topk

TOPK = 40


def command(*args: object, **kwargs) -> subprocess.CompletedProcess:
    """The command in a process of its own, as a shell would run it."""
    line = [sys.executable, "-c", "import sys; from vllm_topkx.cli import main; sys.exit(main())", *map(str, args)]
    return subprocess.run(line, capture_output=True, text=True, timeout=120, **kwargs)


def dump_arrays(seed: int = 0) -> dict:
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((3, 6, 90)).astype(np.float32)
    ends = rng.integers(0, 91, (3, 6)).astype(np.int32)
    return {"logits": logits, "row_ends": ends, "topk": TOPK, "interleave": 16, "local_topk": 7}


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    path = tmp_path / "dump.npz"
    np.savez(path, **dump_arrays())
    return path


def refusal(capsys: pytest.CaptureFixture, *args: object) -> str:
    """The one line of a command that must refuse its input."""
    try:
        code = main([str(arg) for arg in args])
    except SystemExit as leave:
        code = leave.code
    captured = capsys.readouterr()
    assert code == 2
    assert captured.out == ""
    assert captured.err.count("\n") == 1, captured.err
    return captured.err


# the command line itself


@pytest.mark.parametrize("name", [*COMMANDS, "bench passes"])
def test_every_command_has_help_with_an_example(name: str, capsys: pytest.CaptureFixture) -> None:
    if importlib.util.find_spec(f"vllm_topkx.cli.{name.split()[0]}") is None:
        pytest.skip("not in this checkout")
    with pytest.raises(SystemExit) as leave:
        main([*name.split(), "--help"])
    assert leave.value.code == 0
    text = capsys.readouterr().out
    assert "example" in text and f"vllm-topkx {name}" in text


def test_the_top_level_help_names_the_commands(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    assert all(name in text for name in COMMANDS)


@pytest.mark.parametrize("args", [[], ["nope"], ["--nope"], ["verify"], ["bench", "nope"], ["graph"]])
def test_a_wrong_command_line_is_one_line(args: list[str], capsys: pytest.CaptureFixture) -> None:
    assert "--help" in refusal(capsys, *args)


# verify


def test_verify_writes_ids_saturation_and_reference(dump: Path, tmp_path: Path) -> None:
    out = tmp_path / "ids"  # without .npz: the path is taken as given
    done = command("verify", dump, "--backend", "cpu", "--out", out, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["ok"] and report["mismatches"] == [] and report["backend"] == "cpu"
    arrays = dump_arrays()
    reference = reference_topk(arrays["logits"], arrays["row_ends"], TOPK, 16)
    with np.load(out) as written:
        assert sorted(written.files) == ["ids", "reference", "saturated"]
        np.testing.assert_array_equal(written["reference"], reference)
        for ids in written["ids"]:
            np.testing.assert_array_equal(np.sort(ids), np.sort(reference))
        assert {a: (written[a].shape, written[a].dtype.name) for a in written.files} == {
            "ids": ((3, 6, TOPK), "int32"),
            "reference": ((6, TOPK), "int32"),
            "saturated": ((6,), "int32"),
        }
        assert report["saturated_rows"] == (written["saturated"] != 0).sum() > 0
    assert sorted(os.listdir(tmp_path)) == ["dump.npz", "ids"]


def test_verify_prints_text_and_takes_bf16(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    arrays = dump_arrays()
    bits = (arrays.pop("logits").view(np.uint32) >> 16).astype(np.uint16)
    path = tmp_path / "b.npz"
    np.savez(path, logits_bf16=bits, topk=np.int64(TOPK))
    assert main(["verify", str(path), "--interleave", "64", "--topk", "33", "--backend", "nccl"]) == 0
    text = capsys.readouterr().out
    assert "bfloat16" in text and "topk 33, interleave 64" in text
    assert text.splitlines()[-1].startswith("OK")


@pytest.mark.parametrize("as_json", [False, True])
def test_a_mismatch_is_named(
    dump: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, as_json: bool
) -> None:
    arrays = dump_arrays()
    right = reference_topk(arrays["logits"], arrays["row_ends"], TOPK, 16)
    ids = np.stack([right] * 3)
    ids[2, 1, 0] = 12345

    def wrong_merge(*args, **kwargs) -> MergedDump:
        return MergedDump(ids, np.zeros(6, dtype=np.int32))

    monkeypatch.setattr(verify, "merge_dump", wrong_merge)
    code = main(["verify", str(dump), "--out", str(tmp_path / "o.npz"), *(["--json"] if as_json else [])])
    text = capsys.readouterr().out
    assert code == 1
    missing = int(right[1, 0])
    if as_json:
        assert json.loads(text)["mismatches"] == [{"row": 1, "rank": 2, "missing": [missing], "extra": [12345]}]
        assert json.loads(text)["order_differs"] == [1]
    else:
        assert f"row 1, rank 2: missing [{missing}], extra [12345]" in text
        assert "different orders in 1 rows: [1]" in text and "MISMATCH: 1 of 6 rows are wrong" in text
    assert (tmp_path / "o.npz").exists()


def test_another_order_alone_is_a_mismatch(dump: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = dump_arrays()
    ids = np.stack([reference_topk(arrays["logits"], arrays["row_ends"], TOPK, 16)] * 3)
    ids[1, 0] = ids[1, 0, ::-1]
    monkeypatch.setattr(verify, "merge_dump", lambda *args, **kwargs: MergedDump(ids, np.zeros(6, dtype=np.int32)))
    assert main(["verify", str(dump)]) == 1


L3 = np.zeros((3, 2, 5), dtype=np.float32)
BAD_DUMPS = {
    "no logits": ({"topk": 4, "other": L3}, "holds no logits"),
    "both logits": ({"logits": L3, "logits_bf16": L3.astype(np.uint16), "topk": 4}, "both"),
    "float64": ({"logits": L3.astype(np.float64), "topk": 4}, "float64: must be float32"),
    "bf16 as float": ({"logits_bf16": L3, "topk": 4}, "float32: must be uint16"),
    "objects": ({"logits": np.array([[[None]]]), "topk": 4}, "readable"),
    "two axes": ({"logits": L3[0], "topk": 4}, "[ranks, rows, positions]"),
    "one rank": ({"logits": L3[:1], "topk": 4}, "world size 1"),
    "17 ranks": ({"logits": np.zeros((17, 1, 1), np.float32), "topk": 4}, "world size 17"),
    "no rows": ({"logits": L3[:, :0], "topk": 4}, "no rows"),
    "no topk": ({"logits": L3}, "--topk"),
    "topk 0": ({"logits": L3, "topk": 0}, "topk 0"),
    "topk 4097": ({"logits": L3, "topk": 4097}, "1..4096"),
    "topk a float": ({"logits": L3, "topk": 4.0}, "whole number"),
    "topk a list": ({"logits": L3, "topk": [4, 5]}, "whole number"),
    "local_topk 0": ({"logits": L3, "topk": 4, "local_topk": 0}, "local_topk 0"),
    "local_topk above topk": ({"logits": L3, "topk": 4, "local_topk": 5}, "local_topk 5"),
    "interleave 0": ({"logits": L3, "topk": 4, "interleave": 0}, "interleave 0"),
    "positions past int32": ({"logits": L3, "topk": 4, "interleave": 2**30}, "2**31"),
    "row_ends float": ({"logits": L3, "topk": 4, "row_ends": np.ones((3, 2))}, "whole numbers"),
    "row_ends shape": ({"logits": L3, "topk": 4, "row_ends": np.ones((2, 3), int)}, "[3, 2]"),
    "row_ends above L": ({"logits": L3, "topk": 4, "row_ends": np.full((3, 2), 6)}, "0..5"),
    "row_ends negative": ({"logits": L3, "topk": 4, "row_ends": np.full((3, 2), -1)}, "0..5"),
    "calls of other rows": ({"logits": L3, "topk": 4, "calls": [2, 1]}, "calls have 3 rows in all: must be 2"),
    "empty call": ({"logits": L3, "topk": 4, "calls": [2, 0]}, "above 0"),
    "epoch": ({"logits": L3, "topk": 4, "epoch": 2**32}, "epoch 4294967296"),
    "block_size": ({"logits": L3, "topk": 4, "interleave": 4, "block_size": 6}, "multiple of interleave 4"),
    "positions past bf16": ({"logits_bf16": np.zeros((2, 1, 131073), np.uint16), "topk": 4}, "131072"),
}


@pytest.mark.parametrize("name", BAD_DUMPS)
def test_a_bad_dump_is_one_line(name: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    arrays, reason = BAD_DUMPS[name]
    np.savez(tmp_path / "bad.npz", **arrays)
    line = refusal(capsys, "verify", tmp_path / "bad.npz", "--out", tmp_path / "ids.npz")
    assert reason in line and "bad.npz" in line
    assert os.listdir(tmp_path) == ["bad.npz"]


def test_options_come_before_the_dump_and_are_checked(dump: Path, capsys: pytest.CaptureFixture) -> None:
    for option, value, reason in [
        ("--topk", "0", "topk 0"),
        ("--topk", "5", "local_topk 7"),
        ("--local-topk", "41", "local_topk 41"),
        ("--interleave", "-1", "interleave -1"),
        ("--topk", "x", "invalid int"),
        ("--backend", "gpu", "invalid choice"),
    ]:
        assert reason in refusal(capsys, "verify", dump, option, value)


def test_files_that_are_no_dumps(dump: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    np.save(tmp_path / "one.npy", L3)
    (tmp_path / "text.npz").write_text("hello")
    (tmp_path / "empty.npz").write_bytes(b"")
    (tmp_path / "cut.npz").write_bytes(dump.read_bytes()[:-600])
    broken = bytearray(dump.read_bytes())
    broken[200:260] = bytes(60)
    (tmp_path / "broken.npz").write_bytes(broken)
    for name in ("one.npy", "text.npz", "empty.npz", "cut.npz", "broken.npz"):
        assert name in refusal(capsys, "verify", tmp_path / name)
    assert "No such file" in refusal(capsys, "verify", tmp_path / "none.npz")
    assert "directory" in refusal(capsys, "verify", tmp_path)


def test_an_output_that_cannot_be_written_is_found_before_the_work(
    dump: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(verify, "merge_dump", lambda *args, **kwargs: pytest.fail("merged"))
    before = dump.read_bytes()
    (tmp_path / "link.npz").symlink_to(dump)
    for out in (tmp_path / "none" / "ids.npz", tmp_path, "/dev/null", dump, tmp_path / "link.npz"):
        assert str(out) in refusal(capsys, "verify", dump, "--out", out)
    assert dump.read_bytes() == before


def test_a_failed_run_keeps_the_old_output(dump: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args, **kwargs) -> None:
        raise ExchangeTimeoutError("g", 0, 1, 1, 1, 10.0)

    monkeypatch.setattr(verify, "merge_dump", fail)
    (tmp_path / "ids.npz").write_text("old")
    assert main(["verify", str(dump), "--out", str(tmp_path / "ids.npz")]) == 1
    assert (tmp_path / "ids.npz").read_text() == "old"
    assert len(os.listdir(tmp_path)) == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
@pytest.mark.parametrize("backend", ["cuda", "loopback"])
def test_backends_that_need_a_gpu_say_so(backend: str, dump: Path, capsys: pytest.CaptureFixture) -> None:
    assert "this machine has" in refusal(capsys, "verify", dump, "--backend", backend)


def test_a_setting_that_is_not_allowed(
    dump: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("VLLM_TOPKX_MAX_ROWS", "many")
    assert "VLLM_TOPKX_MAX_ROWS='many'" in refusal(capsys, "verify", dump, "--backend", "cpu")


def test_interrupt_is_quiet_and_leaves_nothing(tmp_path: Path) -> None:
    logits = np.zeros((2, 40, 200_000), dtype=np.float32)
    np.savez(tmp_path / "large.npz", logits=logits, topk=64)
    program = (  # a job in the background of a script is started with SIGINT ignored
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from vllm_topkx.cli import main; print('up', flush=True); sys.exit(main())"
    )
    line = [sys.executable, "-c", program, "verify", "large.npz", "--backend", "cpu", "--out", "ids.npz"]
    process = subprocess.Popen(
        line, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    assert process.stderr is not None
    first = process.stderr.readline()  # of progress: it is at work
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the ranks, too
    out, err = process.communicate(timeout=60)
    err = first + err
    assert process.returncode == 130
    assert out == "" and all(line.startswith(("merging", "sorting")) for line in err.splitlines()), err
    assert os.listdir(tmp_path) == ["large.npz"]


# doctor


def test_doctor_json_has_its_keys(capsys: pytest.CaptureFixture) -> None:
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert list(report) == [
        *("ok", "versions", "cpu", "gpus", "peer_access", "symmetric_memory", "cute_dsl", "shared_memory"),
        *("backends", "settings", "vllm"),
    ]
    assert list(report["backends"]) == ["cuda", "loopback", "cpu", "nccl"]
    for answer in (*report["backends"].values(), report["symmetric_memory"], report["vllm"]["plugin"]):
        assert answer["available"] == (answer["reason"] is None)


def test_doctor_times_what_a_worker_compiles(capsys: pytest.CaptureFixture) -> None:
    assert main(["doctor", "--compile", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["compile"]
    assert found["reason"] is None and found["kernels"] == 2 and found["arch"].startswith("sm_")
    assert found["compile_seconds"] > 0 and found["import_seconds"] > 0


def test_doctor_imports_neither_vllm_nor_cutlass() -> None:
    code = (
        "import sys; from vllm_topkx.cli import main; code = main(['doctor']);"
        "bad = {'vllm', 'cutlass'} & set(sys.modules); sys.exit(code or len(bad))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for title in ("Versions", "Backends", "Settings", "vLLM"):
        assert title in done.stdout


def test_doctor_says_what_is_wrong_with_a_setting(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("VLLM_TOPKX_TIMEOUT_S", "soon")
    assert main(["doctor", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert "soon" in report["settings"]["reason"] and "soon" in report["backends"]["cpu"]["reason"]


# graph

STEP = """
import torch, torch.distributed as dist, vllm_topkx
from vllm_topkx.ops.nccl.form import merge_all_gather

def build():
    name, rank, ranks = dist.group.WORLD.group_name, dist.get_rank(), dist.get_world_size()
    n = vllm_topkx.reserve(name, rows=8, topk=64).settings.local_topk

    def step(logits, row_ends):
        words = torch.ops.topkx.local_topk_words(logits, row_ends, n)
        return merge_all_gather(words, logits, row_ends, name, rank, ranks, 64, n, 16)[2]

    return step, (torch.randn(8, 100), torch.full((8,), 100, dtype=torch.int32))

def failing():
    raise ValueError("no\\nmodel")

def not_a_pair():
    return 1

number = 1
"""


def test_graph_shows_the_pass(tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "step.py").write_text(STEP)
    monkeypatch.chdir(tmp_path)
    assert main(["graph", "step:build"]) == 0
    before, after = capsys.readouterr().out.split("after:")
    assert "- " in before and "topkx.topk_select" in before and "all_gather_into_tensor" in before
    assert "+ exchange_merge" in after and "topk_select" not in after
    assert "1 chains rewritten to exchanges, 0 left alone" in after


def test_graph_refuses_what_it_cannot_run(tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "step.py").write_text(STEP)
    monkeypatch.chdir(tmp_path)
    for target, reason in [
        ("step", "MODULE:FUNCTION"),
        (":build", "MODULE:FUNCTION"),
        ("none:build", "No module named 'none'"),
        ("step:none", "has no function none"),
        ("step:number", "has no function number"),
        ("step:failing", "ValueError: no model"),
        ("step:not_a_pair", "must return (callable, tuple of example inputs)"),
    ]:
        code = main(["graph", target, "--ranks", "1"])
        captured = capsys.readouterr()
        line = captured.err.splitlines()[-1]
        assert code == 2 and captured.out == "" and reason in line, captured.err
    assert "--ranks 17" in refusal(capsys, "graph", "step:build", "--ranks", "17")


def test_graph_text() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(2, 3, device="meta", dtype=torch.bfloat16)
    pair = graph.call_function(torch.ops.aten.sort.default, (x,), {"descending": True})
    pair.meta["val"] = (x.meta["val"], torch.empty(2, 3, device="meta", dtype=torch.int64))
    first = graph.call_function(operator.getitem, (pair, 0))
    total = graph.call_function(torch.ops.aten.sum.dim_IntList, (first, [1]))
    graph.output((total,))
    assert graph_text(graph).splitlines() == [
        "x: bf16[2, 3] = input",
        "sort_default: (bf16[2, 3], i64[2, 3]) = aten.sort(x, descending=True)",
        "getitem = sort_default[0]",
        "sum_dim_int_list = aten.sum.dim_IntList(getitem, [1])",
        "return (sum_dim_int_list,)",
    ]


# bench


def test_bench_passes_rewrites_every_chain(tmp_path: Path) -> None:
    done = command("bench", "passes", "--nodes", 400, "--chains", 8, "--json", tmp_path / "passes.json")
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "passes.json").read_text())
    assert report["machine"]["torch"] == torch.__version__.partition("+")[0]
    assert [(t["chains"], t["rewritten"]) for t in report["passes"]] == [(1, 1), (2, 2), (4, 4), (8, 8), (16, 16)]
    assert abs(report["passes"][3]["nodes"] - 400) < 40
    assert "ExchangeMergePass" in done.stdout


def test_bench_passes_refuses_more_chains_than_fit(capsys: pytest.CaptureFixture) -> None:
    assert "1..3" in refusal(capsys, "bench", "passes", "--nodes", "100", "--chains", "4")
