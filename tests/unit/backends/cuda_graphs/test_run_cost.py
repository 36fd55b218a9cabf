"""Whether a capture gains anything: the host's share of a run, and what it decides."""

from __future__ import annotations

import pytest
import torch

from compile_cache.backends.base import CaptureFacts
from compile_cache.backends.cuda_graphs import capture as capturing
from compile_cache.backends.cuda_graphs.run_cost import RunCost, cost_of_run
from compile_cache.errors import NoGainError


class Watch:
    """A stopwatch that says how long the GPU took."""

    def __init__(self, seconds: float) -> None:
        self.measured = seconds

    def seconds(self, wait: bool) -> float | None:
        assert wait, "the time is not known before the GPU is there"
        return self.measured


@pytest.mark.parametrize(("host", "device", "share"), [(0.02, 0.08, 0.25), (0.02, 0.02, 1.0), (0.03, 0.02, 1.5)])
def test_the_hosts_share_of_the_gpus_time(host: float, device: float, share: float) -> None:
    cost = RunCost(host_seconds=host, watch=Watch(device))  # type: ignore[arg-type]
    assert cost.host_share() == pytest.approx(share)


def test_on_the_cpu_nothing_is_measured_and_nothing_is_refused() -> None:
    with cost_of_run("cpu") as cost:
        torch.ones(1000)
    assert (cost.bytes, cost.host_seconds, cost.host_share()) == (0, 0.0, 1.0)


def test_a_call_that_the_gpu_limits_is_refused_before_anything_is_copied_or_recorded() -> None:
    with pytest.raises(NoGainError, match="25% of the time"):
        capturing.capture(lambda tensors: None, [], None, CaptureFacts(host_share=0.25, least_host_share=0.5))
