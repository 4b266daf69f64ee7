"""``verify`` on GPUs: the real exchange, the loopback and the all-gather form on hostile rows of both layouts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from vllm_topkx.cli import main
from vllm_topkx.cli.hostile import bf16_bits, stacked
from vllm_topkx.ops.layouts import default_local_topk

GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS == 0, reason="needs a CUDA GPU")]


def verify(
    tmp_path: Path, backend: str, world_size: int, topk: int, local_topk: int, interleave: int, bf16: bool
) -> int:
    """Exit code of the command on all makers' rows."""
    logits, ends, _ = stacked(np.random.default_rng(topk + world_size), world_size, 3, 2500)
    scores = {"logits_bf16": bf16_bits(logits)} if bf16 else {"logits": logits}
    dump, out = tmp_path / "dump.npz", tmp_path / "ids.npz"
    np.savez(dump, **scores, row_ends=ends, topk=topk, local_topk=local_topk, interleave=interleave)
    code = main(["verify", str(dump), "--backend", backend, "--out", str(out)])
    written = np.load(out)
    assert written["ids"].shape == (world_size, ends.shape[1], topk)
    assert (written["saturated"] != 0).any() == (local_topk < topk)
    return code


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("topk, interleave", [(512, 1), (1024, 16), (2048, 64), (77, 1)])
@pytest.mark.parametrize("world_size", [2, 4, 8, 16])
def test_loopback(tmp_path: Path, world_size: int, topk: int, interleave: int, bf16: bool) -> None:
    assert verify(tmp_path, "loopback", world_size, topk, default_local_topk(topk, world_size), interleave, bf16) == 0


@pytest.mark.parametrize("local_topk", [1, 100, 512])
def test_loopback_with_few_and_with_all_candidates(tmp_path: Path, local_topk: int) -> None:
    assert verify(tmp_path, "loopback", 8, 512, local_topk, 1, False) == 0


@pytest.mark.gpu2
@pytest.mark.skipif(GPUS < 2, reason="needs two CUDA GPUs")
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("backend", ["cuda", "nccl"])
def test_two_gpus(tmp_path: Path, backend: str, bf16: bool) -> None:
    assert verify(tmp_path, backend, 2, 2048, 1152, 16, bf16) == 0
