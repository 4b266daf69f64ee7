"""The short form of ``vllm-topkx soak --merges 1000000`` on two GPUs."""

from __future__ import annotations

import json

import pytest
import torch

from vllm_topkx.cli import main, soak_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.gpu2,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs"),
]


@pytest.mark.parametrize("topk", [512, 2048])
def test_soak(topk: int, capsys: pytest.CaptureFixture) -> None:
    code = main(["soak", "--merges", "30000", "--topk", str(topk), "--json"])
    found = json.loads(capsys.readouterr().out)
    print(found)
    assert (code, found["problems"], found["backend"]) == (0, [], "cuda")
    assert found["wrapped_rows"] == soak_ranks.ROWS
