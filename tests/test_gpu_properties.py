"""Random merges on GPUs: the property of test_properties.py on the loopback, the exchange and the all-gather."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from properties import check, choosing

from vllm_topkx.cli.fuzz import merging
from vllm_topkx.cli.fuzz_case import Limits, choose_dump

GPUS = torch.cuda.device_count()
two_gpus = [pytest.mark.gpu2, pytest.mark.skipif(GPUS < 2, reason="needs two CUDA GPUs")]
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS == 0, reason="needs a CUDA GPU")]
LIMITS = Limits(calls=4, rows=40, columns=3000, candidates=1 << 19)


@pytest.mark.parametrize(
    "backend", ["loopback", pytest.param("cuda", marks=two_gpus), pytest.param("nccl", marks=two_gpus)]
)
def test_random_merges(backend: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    with merging(backend) as (merge, shapes):

        @settings(settings.get_profile("reproducible"), max_examples=60)
        @given(data=st.data())
        def every_example(data: st.DataObject) -> None:
            dump = choose_dump(choosing(data), data.draw(st.sampled_from(shapes)), LIMITS)
            check(replace(dump, lists=0) if backend == "nccl" else dump, merge, tmp_path_factory.mktemp("dump"))

        every_example()
