"""``vllm-topkx bench``: arguments, results and their output, what is called right, and the ranks' part on CPUs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch

from vllm_topkx.cli import bench, bench_local, bench_plan, bench_ranks, main
from vllm_topkx.cli.bench_case import BUFFERS, Case, fill_scores, local_topk
from vllm_topkx.cli.bench_check import Truth, worst
from vllm_topkx.cli.bench_machine import links
from vllm_topkx.cli.bench_plan import Plan
from vllm_topkx.cli.bench_plot import draw
from vllm_topkx.cli.bench_record import (
    EXACT,
    GPU_SYSTEMS,
    LOCAL_SYSTEMS,
    LOOPBACK_SYSTEMS,
    TIES,
    UNCHECKED,
    WRONG,
    Measurement,
    Panel,
    Results,
)
from vllm_topkx.cli.bench_table import print_results
from vllm_topkx.ops.spec import KvMap
from vllm_topkx.ranks import RankContext, RankPool

PANEL = Panel(2, 2048, "random")


# arguments


def refusal(capsys: pytest.CaptureFixture, *args: str) -> str:
    """The one line of a command that must refuse its input."""
    try:
        code = main(["bench", *args])
    except SystemExit as leave:
        code = leave.code
    captured = capsys.readouterr()
    assert code == 2
    assert captured.out == ""
    assert captured.err.count("\n") == 1, captured.err
    return captured.err


@pytest.mark.parametrize(
    "args, word",
    [
        (["--rows", "0"], "--rows"),
        (["--rows", "1,x"], "--rows"),
        (["--rows", "1,1"], "--rows"),
        (["--rows", "257"], "VLLM_TOPKX_MAX_ROWS"),
        (["--topk", "4097"], "4096"),
        (["--topk", "2048", "--columns", "1024"], "--columns 1024"),
        (["--columns", "1000000"], "131072"),
        (["--interleave", "3"], "--interleave 3"),
        (["--interleave", "64", "--columns", "4100"], "multiple of 64"),
        (["--scores", "random,odd"], "--scores odd"),
        (["--systems", "vllm,nope"], "--systems nope"),
        (["--systems", "merge:K"], "cuda has"),
        (["--calls", "19"], "20..100"),
        (["--rounds", "0"], "--rounds 0"),
        (["--ranks", "17"], "--ranks 17"),
        (["--ranks", "2,4"], "one W at a time"),
        (["--backend", "gloo"], "--backend"),
        (["--plot", "x.jpeg"], ".png"),
        (["local", "--columns", "1024"], "--columns 1024"),
        (["local", "--topk", "5000"], "--topk 5000"),
        (["local", "--scores", "odd"], "--scores odd"),
        (["nope"], "--help"),
    ],
)
def test_bad_input_is_one_line(args: list[str], word: str, capsys: pytest.CaptureFixture) -> None:
    assert word in refusal(capsys, *args)


@pytest.mark.parametrize("args", [[], ["--quick"], ["--backend", "loopback"], ["local"]])
def test_no_gpu_is_one_line(args: list[str], capsys: pytest.CaptureFixture) -> None:
    with mock.patch.object(torch.cuda, "device_count", lambda: 0):
        assert "needs an NVIDIA GPU: this machine has none" in refusal(capsys, *args)


def test_one_gpu_is_not_enough_for_ranks(capsys: pytest.CaptureFixture) -> None:
    with mock.patch.object(torch.cuda, "device_count", lambda: 1):
        assert "this machine has 1; use --backend loopback" in refusal(capsys)


def plan(*args: str, gpus: int = 2) -> Plan:
    parsed: list[Plan] = []

    def keep(args) -> int:
        parsed.append(Plan.of(args))
        return 0

    with mock.patch.object(bench, "run", keep), mock.patch.object(torch.cuda, "device_count", lambda: gpus):
        assert main(["bench", *args]) == 0
    return parsed[0]


def test_what_is_measured_by_default() -> None:
    found = plan()
    assert (found.world_sizes, found.rows, found.topk) == ((2,), bench_plan.ROWS, bench_plan.TOPK)
    assert found.systems == tuple(GPU_SYSTEMS) and found.scores == ("random",)
    assert found.steps == len(list(found.configurations())) == 27
    quick = plan("--quick", "--topk", "512", "--scores", "ties,skewed", gpus=8)
    assert (quick.world_sizes, quick.rows, quick.topk) == ((8,), bench_plan.QUICK_ROWS, (512,))
    assert list(quick.configurations())[:4] == [(512, "ties", rows) for rows in (1, 16, 64)] + [(512, "skewed", 1)]
    json.dumps(quick.settings())


def test_loopback_and_chosen_systems() -> None:
    found = plan("--backend", "loopback", "--systems", "floor:N,merge:N", "--topk", "1000,40", gpus=1)
    assert found.world_sizes == (8, 16)
    assert found.systems == ("merge:N", "floor:N")  # in the table's order
    assert found.columns == 2048
    assert all(name in LOOPBACK_SYSTEMS for name in found.systems)


def test_options_before_a_subcommand_hold() -> None:
    parsed = []
    with mock.patch.object(bench_local, "run", lambda args: parsed.append(args) or 0):
        assert main(["bench", "--json", "x.json", "--rows", "3", "local", "--topk", "7", "--quick"]) == 0
    args = parsed[0]
    assert (args.json, args.rows, args.topk, args.quick) == (Path("x.json"), (3,), (7,), True)
    with mock.patch.object(torch.cuda, "device_count", lambda: 1):
        found = bench_local.LocalPlan.of(args)
    assert (found.rows, found.topk, found.columns) == ((3,), (7,), bench_local.QUICK_COLUMNS)


# results


def recorded() -> Results:
    """Made-up numbers: only their handling is tested."""
    results = Results("bench", {"GPU": "2x Fake", "torch": "0.0", "driver": None}, {"calls": 20}, GPU_SYSTEMS)
    for rows in (1, 64):
        for system, microseconds, verdict in [
            ("vllm", 16.0, EXACT),
            ("vllm+rows", 20.0, EXACT),
            ("torch", 40.0, TIES),
            ("words:N", 8.0, EXACT),
            ("words:N+rows", 5.0, WRONG),
            ("floor:N", 4.0, UNCHECKED),
        ]:
            times = [rows * microseconds * (1 + step / 100) for step in range(-10, 11)]
            results.measurements.append(Measurement.of(system, PANEL, rows, 4096, times, verdict))
    results.leave_out([("nccl:N", "no\nlibrary"), ("nccl:N", "a later reason")])
    results.note("fake")
    results.note("fake")
    return results


def test_medians_and_ratios() -> None:
    results = recorded()
    words = results.get("words:N", PANEL, 64, 4096)
    assert (words.microseconds, words.low, words.high) == (512.0, 471.04, 552.96)
    assert results.of_baseline(words) == 0.5 and results.of_floor(words) == 2.0
    with_rows = results.get("words:N+rows", PANEL, 1, 4096)
    assert results.of_baseline(with_rows) == 0.25  # of vLLM with its filter-and-convert
    vllm = results.get("vllm", PANEL, 1, 4096)
    assert results.of_baseline(vllm) is None and results.of_floor(vllm) is None  # the floor of K words is not there
    assert len(results.wrong) == 2 and results.notes == ["fake"]


@pytest.mark.parametrize("systems", [GPU_SYSTEMS, LOOPBACK_SYSTEMS, LOCAL_SYSTEMS])
def test_baselines_and_floors_are_systems(systems: dict) -> None:
    for system in systems.values():
        assert system.baseline is None or system.baseline in systems
        assert system.floor is None or systems[system.floor].floor is None


def test_the_table(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    print_results(recorded())
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert lines[:3] == ["GPU: 2x Fake", "torch: 0.0", "driver: unknown"]
    assert "2 ranks, K = 2048, random scores, 4096 columns" in lines
    words = lines[next(i for i, line in enumerate(lines) if line.strip().startswith("words:N ")) :]
    assert words[0].split() == ["words:N", "8.00", "512.00"]
    assert words[1].split()[-4:] == ["0.50", "2.0x", "0.50", "2.0x"]
    assert "40.00 ~" in text and "5.00 WRONG" in text and "WRONG: words:N+rows" in text
    assert "left out: nccl:N: no library" in lines and "note: fake" in lines


def test_json() -> None:
    found = json.loads(recorded().to_json())
    assert found["machine"]["GPU"] == "2x Fake" and found["settings"] == {"calls": 20}
    row = found["measurements"][3]
    assert row["system"] == "words:N" and (row["world_size"], row["topk"], row["scores"]) == (2, 2048, "random")
    assert (row["microseconds"], row["of_baseline"], row["of_floor"], row["verdict"]) == (8.0, 0.5, 2.0, EXACT)
    assert found["left_out"] == {"nccl:N": "no library"}


def test_the_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "partial"
    results = recorded()
    results.measurements.append(Measurement.of("vllm", Panel(2, 512, "ties"), 1, 4096, [3.0], EXACT))
    draw(results, path, "png")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_run_writes_all_and_fails_for_a_wrong_result(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    pytest.importorskip("matplotlib")

    def measure(plan: Plan, results: Results, advance: Callable[[int], None]) -> None:
        results.measurements += recorded().measurements
        advance(1)

    with (
        mock.patch.object(torch.cuda, "device_count", lambda: 2),
        mock.patch("vllm_topkx.cli.bench_machine.machine", lambda: {"GPU": "2x Fake"}),
        mock.patch.object(bench_ranks, "measure_on_gpus", measure),
    ):
        args = ["--quick", "--json", str(tmp_path / "b.json"), "--plot", str(tmp_path / "b.svg")]
        assert main(["bench", *args]) == 1
    assert json.loads((tmp_path / "b.json").read_text())["settings"]["calls"] == 20
    assert b"<svg" in (tmp_path / "b.svg").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.json", "b.svg"]
    assert "words:N" in capsys.readouterr().out


def test_links_of_nvidia_smi() -> None:
    status = "GPU 0: NVIDIA H200 (UUID: x)\n\t Link 0: 26.562 GB/s\n\t Link 1: 26.562 GB/s\n\t Link 2: <inactive>\n"
    assert links(status) == "2 NVLinks of 26.562 GB/s"
    assert links("") is None and links(None) is None


def test_a_call_takes_as_long_as_its_slowest_rank() -> None:
    results = Results("bench", {}, {}, GPU_SYSTEMS)
    samples = (
        bench_ranks.Sample("vllm", [1.0, 5.0, 3.0], EXACT),
        bench_ranks.Sample("vllm", [2.0, 4.0, 3.0], TIES),
    )
    bench_ranks.add_sample(results, PANEL, 1, 64, samples)
    bench_ranks.add_sample(results, PANEL, 1, 64, (bench_ranks.Sample("torch", [], UNCHECKED, "broken"),) * 2)
    assert (results.measurements[0].microseconds, results.measurements[0].high) == (3.0, 5.0)
    assert results.measurements[0].verdict == TIES and results.left_out == {"torch": "broken"}


# what is right


def all_scores(kind: str, world_size: int, rows: int, columns: int) -> torch.Tensor:
    scores = torch.zeros(world_size, rows, columns)
    for rank in range(world_size):
        fill_scores(scores[rank], kind, rank, world_size, seed=5)
    return scores


@pytest.mark.parametrize("interleave", [1, 16])
def test_verdicts_on_ids(interleave: int) -> None:
    scores = (all_scores("ties", 3, 4, 64) / 16).floor()
    truth = Truth.of(scores, 20, interleave)
    ids = truth.ids.flip(-1).to(torch.int32)
    assert truth.verdict_on_ids(ids) == EXACT
    row = scores[:, 0].clone()
    threshold = min(float(row[int(g) // interleave % 3, local(int(g), 3, interleave)]) for g in truth.ids[0])
    tied = [g for g in range(3 * 64) if float(row[g // interleave % 3, local(g, 3, interleave)]) == threshold]
    spare = [g for g in tied if g not in truth.ids[0]]
    taken = [g for g in tied if g in truth.ids[0]]
    assert spare
    other = truth.ids.clone()
    other[0][other[0] == taken[-1]] = spare[-1]
    assert truth.verdict_on_ids(other.to(torch.int32)) == TIES
    other[0, 0] = other[0, 1]
    assert truth.verdict_on_ids(other.to(torch.int32)) == WRONG
    assert truth.verdict_on_ids(torch.full_like(ids, -1)) == WRONG
    assert worst([EXACT, TIES, EXACT], WRONG) == TIES and worst([], UNCHECKED) == UNCHECKED


def local(g: int, world_size: int, interleave: int) -> int:
    return g // (world_size * interleave) * interleave + g % interleave


def test_verdicts_on_rows() -> None:
    scores = all_scores("random", 2, 3, 128)
    truth = Truth.of(scores, 20, 1)
    kv = KvMap(torch.tensor([[7, 3], [1, 0], [4, 9]], dtype=torch.int32), torch.tensor([2, 0, 1]).int(), 64, 64)
    rows = torch.full((3, 20), -1, dtype=torch.int32)
    valid = torch.zeros(3, dtype=torch.int32)
    for t in range(3):
        own = [int(g) // 2 for g in truth.ids[t].flip(0) if g % 2 == 1]
        valid[t] = len(own)
        blocks = kv.block_table[int(kv.req_id[t])]
        rows[t, : len(own)] = torch.tensor([int(blocks[j // 64]) * 64 + j % 64 for j in own])
    assert truth.verdict_on_rows(rows, valid, 1, kv) == EXACT
    assert truth.verdict_on_rows(rows, valid + 1, 1, kv) == WRONG
    assert truth.verdict_on_rows(rows.roll(1, dims=1), valid, 1, kv) == WRONG
    assert truth.verdict_on_rows(rows, valid, 0, kv) == WRONG


def test_skewed_scores_put_the_winners_of_a_row_on_one_rank() -> None:
    truth = Truth.of(all_scores("skewed", 2, 4, 64), 32, 1)
    assert (truth.ids % 2 == torch.arange(4)[:, None] % 2).all()


def test_fresh_scores_reach_words_and_lists() -> None:
    case = Case(0, 2, 3, 64, 16, "random", BUFFERS + 3, "cpu")
    case.refresh(1)
    words = case.words_of(8)
    before = words.clone()
    case.refresh(2)
    case.restore_lists()
    assert not torch.equal(words, before)
    assert torch.equal(words[1], torch.ops.topkx.local_topk_words(case.logits[1], case.ends, 8))
    assert torch.equal(case.lists[BUFFERS + 2], case.best[2])
    assert torch.equal(case.best[0], local_topk(case.logits[0], 16))


# the ranks' part, eagerly and on CPUs


class Eager:
    """In the place of a CUDA graph."""

    def __init__(self, call: Callable, calls: int, before: Callable[[], None] = lambda: None) -> None:
        self.call, self.calls, self.before = call, calls, before

    def time(self, replays: int, group: object) -> list[float]:
        for _ in range(replays):
            self.before()
            self.outputs = [self.call(i) for i in range(self.calls)]
        return [1.0] * replays


SYSTEMS = tuple(name for name in GPU_SYSTEMS if name == "torch" or name.startswith(("nccl", "list", "words", "logits")))


def measured(context: RankContext, plan: Plan, scores: str) -> list[bench_ranks.Sample]:
    with mock.patch.object(bench_ranks, "Graphed", Eager), mock.patch.object(torch.cuda, "synchronize"):
        samples, notes = bench_ranks.measure_case(context, plan, plan.topk[0], scores, plan.rows[0])
    assert notes == []
    return samples


@pytest.mark.parametrize("scores", ["random", "skewed", "ties"])
def test_every_system_that_runs_on_cpus_is_right(pool: RankPool, scores: str) -> None:
    small = Plan("cuda", (2,), (3,), (64,), (scores,), SYSTEMS, 128, 16, 10, 2, 1)
    for samples in pool.run(measured, small, scores, world_size=2):
        assert [sample.system for sample in samples] == list(SYSTEMS)
        assert all(sample.reason is None and len(sample.times) == 2 for sample in samples), samples
        for sample in samples:
            assert sample.verdict == EXACT or (sample.system == "torch" and sample.verdict == TIES), sample


def test_the_floor_moves_the_words_of_the_other_ranks() -> None:
    pytest.importorskip("cutlass")
    from interpreted import Interpreted, kernel_of

    from vllm_topkx.ops.cute import ll_floor

    interpreted = Interpreted(2, 3, 40, 40, torch.bfloat16)
    words = torch.randint(-(2**31), 2**31, (2, 3, 44), dtype=torch.int64).to(torch.int32)
    for _ in range(2):
        with mock.patch.object(ll_floor, "compiled", lambda variant, device: kernel_of(variant)):
            interpreted.run(lambda e: ll_floor.prepare_floor(e, words[e.rank], interpreted.spec(e.rank, 1)))
    for exchange, buffer in zip(interpreted.exchanges, interpreted._buffers, strict=True):
        assert exchange.epoch.tolist() == [2, 2, 2]
        slots = buffer[: 2 * 2 * words.numel()].view(2, *words.shape, 2)
        other = 1 - exchange.rank
        assert not slots[:, exchange.rank].any()
        for parity, epoch in ((0, 2), (1, 1)):
            sent = slots[parity, other]
            assert torch.equal(sent[..., 0], words[other]) and (sent[..., 1] == epoch).all()
