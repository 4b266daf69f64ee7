"""Every kernel compiles for every architecture without a GPU; what the code uses; the cache of compiled kernels.

Hopper: all of K 512/1024/2048, W 2/8/16, N the default and K, both layouts, for the exchange from words;
each other kernel for the corners of that. Blackwell: each kernel in one layout, which alternates.
"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import cutlass
import pytest
import torch
from cubin import usage
from shared_memory import SHARED_BYTES

from vllm_topkx.ops.cute import block_select, cache, device, row_words
from vllm_topkx.ops.cute.compile import ListMerge, LocalTopk, Rescue, Select, WordsMerge
from vllm_topkx.ops.cute.primitives import shared_words
from vllm_topkx.ops.cute.shape import RowShape
from vllm_topkx.ops.errors import BackendUnavailableError, TopkxError
from vllm_topkx.ops.layouts import default_local_topk

PUSH = "st.relaxed.sys.global.v4.b32"
POLL_PAIRS, POLL_HALVES = "ld.volatile.global.v4.u32", "ld.volatile.global.v2.u32"
HOPPER, BLACKWELL = "sm_90a", ("sm_100a", "sm_103a", "sm_120a")


def shapes(topks: tuple[int, ...], world_sizes: tuple[int, ...]) -> Iterator[RowShape]:
    for k, w, fp32 in itertools.product(topks, world_sizes, (True, False)):
        for n in (default_local_topk(k, w), k):
            yield RowShape(w, k, n, fp32)


def hopper_variants() -> Iterator[object]:
    for shape in shapes((512, 1024, 2048), (2, 8, 16)):
        yield WordsMerge(shape, with_rows=True, emit_ids=True)
    for shape in shapes((2048,), (2, 16)):
        yield ListMerge(shape, with_starts=shape.fp32)
        yield Select(shape, with_rows=shape.fp32, emit_ids=True)
    for fp32 in (True, False):
        yield Rescue(RowShape(8, 2048, 352, fp32), with_rows=True, emit_ids=True)
        yield WordsMerge(RowShape(8, 2048, 352, fp32), with_rows=True, emit_ids=False)
        yield WordsMerge(RowShape(2, 4096, 4096, fp32), with_rows=False, emit_ids=True)
        yield WordsMerge(RowShape(3, 1, 1, fp32), with_rows=False, emit_ids=True)
        for n in (1, 352, 4096):
            yield LocalTopk(n, fp32)


def blackwell_variants(fp32: bool) -> list[object]:
    shape = RowShape(8, 2048, 352, fp32)
    return [
        LocalTopk(352, fp32), Select(shape, True, True), Rescue(shape, True, True),
        WordsMerge(shape, True, True), ListMerge(RowShape(4, 512, 512, fp32), True),
    ]  # fmt: skip


VARIANTS = [(HOPPER, v) for v in hopper_variants()]
VARIANTS += [(arch, v) for i, arch in enumerate(BLACKWELL) for v in blackwell_variants(fp32=i % 2 == 0)]


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTE_DSL_ARCH", HOPPER)


@pytest.mark.parametrize("arch, variant", VARIANTS, ids=lambda v: v if isinstance(v, str) else repr(v))
def test_compiles(arch: str, variant: object) -> None:
    allotted = []

    def counted(smem, count: int):
        allotted.append(4 * count)
        return shared_words(smem, count)

    with (
        mock.patch.object(block_select, "shared_words", counted),
        mock.patch.object(row_words, "shared_words", counted),
    ):
        kernel = variant.build(f"--keep-ptx --keep-cubin --gpu-arch {arch}")
    ptx = kernel.__ptx__
    assert f".target {arch}" in ptx
    assert usage(kernel.__cubin__).frame_bytes == 0, "registers spill"
    assert ".local" not in ptx
    assert sum(allotted) <= SHARED_BYTES
    waits = ptx.index("griddepcontrol.wait")
    assert waits < ptx.find("ld.global"), "reads what the kernel before may still write"
    exchanges = isinstance(variant, (WordsMerge, ListMerge, Rescue))
    assert (PUSH in ptx) == exchanges
    if exchanges:
        assert waits < ptx.index(PUSH)
        # Whole pairs, each half atomic; but halves where a thread holds bf16 candidates, which are a half each.
        halves = variant.shape.held and not variant.shape.fp32 and not isinstance(variant, Rescue)
        assert (POLL_HALVES if halves else POLL_PAIRS) in ptx


# the cache


def test_a_rescue_compares_scores_with_the_threshold_unsigned() -> None:
    """Signed, the threshold of any positive score would be below all scores: right, but of no use."""
    ptx = WordsMerge(RowShape(2, 512, 300, True), False, True).build(f"--keep-ptx --gpu-arch {HOPPER}").__ptx__
    smallest = 0x007FFFFF  # the ord of -inf
    assert set(re.findall(rf"max\.(\w+)\s+%r\d+, %r\d+, {smallest};", ptx)) == {"u32"}


SMALL = LocalTopk(8, True)
CHILD = """
import sys, time
from unittest import mock
import cutlass.cute
from vllm_topkx.ops.cute.cache import compiled
from vllm_topkx.ops.cute.compile import LocalTopk, RowShape
compile_, calls = cutlass.cute.compile, []
def counted(*args, **kwargs):
    calls.append(args)
    time.sleep(float(sys.argv[1]))
    return compile_(*args, **kwargs)
cutlass.cute.compile = counted
assert callable(compiled(LocalTopk(8, True)))
print(len(calls))
"""


def child(folder: Path, delay_s: float = 0) -> subprocess.Popen:
    env = os.environ | {cache.ENV: str(folder), "CUTE_DSL_ARCH": HOPPER}
    command = [sys.executable, "-W", "ignore", "-c", CHILD, str(delay_s)]
    return subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE)


def compilations(process: subprocess.Popen) -> int:
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    return int(out)


def test_only_one_of_several_processes_compiles_and_none_later(tmp_path: Path) -> None:
    together = [child(tmp_path, delay_s=1.0) for _ in range(3)]
    assert sorted(map(compilations, together)) == [0, 0, 1]
    assert compilations(child(tmp_path)) == 0
    for written in tmp_path.glob("*.o"):
        written.write_bytes(b"cut short by a full disk")
    assert compilations(child(tmp_path)) == 1
    assert compilations(child(tmp_path)) == 0


def test_a_folder_that_cannot_be_written_costs_a_compilation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(cache.ENV, str(tmp_path / "file"))
    assert callable(cache._load_or_build(SMALL, HOPPER))


def test_the_sources_and_the_gpu_are_part_of_a_kernels_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cache.ENV, str(tmp_path))
    for fingerprint in ("before", "after", "after"):
        with mock.patch.object(cache, "_fingerprint", lambda fingerprint=fingerprint: fingerprint):
            cache._load_or_build(SMALL, HOPPER)
    cache._load_or_build(SMALL, BLACKWELL[0])
    assert len(list(tmp_path.glob("*.o"))) == 3


def test_capture_needs_a_kernel_that_was_compiled_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(cache, "_in_process", {})
    with pytest.raises(TopkxError, match="not compiled yet: run the call once before you capture it"):
        cache.compiled(SMALL)


@pytest.mark.parametrize("version", ["4.5.2", "4.9.0", "5.0.0.dev1"])
def test_other_releases_of_cute_dsl_are_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutlass, "__version__", version)
    device.require_dsl.cache_clear()
    with pytest.raises(BackendUnavailableError, match=rf"{version} is installed: the kernels need 4\.6 to 4\.8"):
        device.require_dsl()


def test_a_missing_cute_dsl_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cutlass", None)
    device.require_dsl.cache_clear()
    with pytest.raises(BackendUnavailableError, match="needs cutlass: pip install 'nvidia-cutlass-dsl"):
        device.require_dsl()


def test_a_gpu_older_than_hopper_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA L40S")
    with pytest.raises(BackendUnavailableError, match=r"NVIDIA L40S has compute capability 8\.9"):
        device.require_gpu(torch.device("cuda", 0))
