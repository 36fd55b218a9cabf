"""Inductor's options for a trace, and launches of its kernels without measuring their configurations again."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._inductor.runtime.cache_dir_utils import cache_dir

from compile_cache.backends.inductor.lower import lowering
from compile_cache.backends.inductor.lower.compiled_region import KernelByAddress
from compile_cache.backends.inductor.lower.tracing import general_hints, trace
from compile_cache.modules.region_weights import weight_inputs, weight_slots


@dataclass
class Kernel:
    """What Triton's autotuner shows of itself."""

    launchers: list[Any]
    ran: list[Any] = field(default_factory=list)

    def run(self, *args: Any) -> None:
        self.ran.append(args)


def launcher(block: int, warps: int = 4) -> Any:
    return SimpleNamespace(config=SimpleNamespace(kwargs={"XBLOCK": block}, num_warps=warps, num_stages=1))


def test_what_was_found_before_is_chosen_among_the_configurations() -> None:
    kernel = Kernel([launcher(128), launcher(256), launcher(256, warps=8)])
    assert KernelByAddress(kernel).choice is None
    KernelByAddress(kernel).choose({"XBLOCK": 256, "num_warps": 8, "num_stages": 1})
    assert kernel.launchers == [launcher(256, warps=8)]
    assert KernelByAddress(kernel).choice == {"XBLOCK": 256, "num_warps": 8, "num_stages": 1}


def test_a_configuration_that_is_not_there_changes_nothing() -> None:
    kernel = Kernel([launcher(128), launcher(256)])
    KernelByAddress(kernel).choose({"XBLOCK": 512, "num_warps": 4, "num_stages": 1})
    assert len(kernel.launchers) == 2


def test_it_launches_with_tensors_while_it_measures_and_with_addresses_then() -> None:
    tensor = torch.zeros(2)
    kernel = Kernel([launcher(128), launcher(256)])
    KernelByAddress(kernel).run(tensor, 5)
    kernel.launchers = kernel.launchers[:1]
    KernelByAddress(kernel).run(tensor, 5)
    assert kernel.ran == [(tensor, 5), (tensor.data_ptr(), 5)]


def test_a_worker_compiles_in_the_folder_that_goes_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lowering, "scratch", str(tmp_path))
    with lowering._own_folder(True):
        assert Path(cache_dir()).parent == tmp_path
    assert list(tmp_path.iterdir()) == []


class Halved(torch.nn.Module):
    """As Wan's encoder: halves two maps, and then makes one frame of them and of the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.of_maps = torch.nn.Conv2d(4, 4, 3, stride=2)
        self.of_frames = torch.nn.Conv3d(4, 4, (3, 1, 1), stride=(2, 1, 1))

    def forward(self, x: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        maps = self.of_maps(torch.nn.functional.pad(x.transpose(1, 2).flatten(0, 1), (0, 1, 0, 1)))
        frames = maps.unflatten(0, (x.shape[0], 2)).transpose(1, 2)
        result: torch.Tensor = self.of_frames(torch.cat([before, frames], 2))
        return result


def test_a_convolution_over_frames_runs_whichever_kernel_torch_takes_for_a_size() -> None:
    """At batch 1 that is mkldnn's from 20,480 on, counted as channels times frames times rows."""
    module = Halved()
    dims = [("b", None, None, "h", "w"), ("b", None, None, "h2", "w2")]

    def inputs(batch: int, height: int, width: int) -> list[torch.Tensor]:
        return [torch.randn(batch, 4, 2, 2 * height, 2 * width), torch.randn(batch, 4, 1, height, width)]

    with torch.no_grad():
        hints = general_hints({"b": 1, "h": 16, "w": 12, "h2": 8, "w2": 6}, torch.device("cpu"))
        traced = trace(lambda each, *x: type(each).forward(each, *x), module, inputs(1, 8, 6), dims, hints)
        region = lowering.compile_trace(traced)
        for sizes in ((1, 8, 6), (1, 2000, 6), (2, 8, 6), (1, 9, 21)):
            x = inputs(*sizes)
            torch.testing.assert_close(region(weight_inputs(weight_slots(module)), x), module(*x), rtol=1e-4, atol=1e-5)


class TwoStreams(torch.nn.Module):
    """As Flux's double block: joins text and picture, and parts them where the text ends."""

    def __init__(self) -> None:
        super().__init__()
        self.both = torch.nn.Linear(8, 8)
        self.own = torch.nn.Linear(8, 8)

    def forward(self, text: torch.Tensor, picture: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        joined = self.both(torch.cat((text, picture), 1)).softmax(-1)
        return self.own(joined[:, : text.shape[1]]), self.own(joined[:, text.shape[1] :])


@pytest.mark.parametrize("oblivious", [True, False])
def test_tokens_that_are_parted_where_others_end_are_lowered_in_either_way(oblivious: bool) -> None:
    module = TwoStreams()
    dims = [("b", "n", None), ("b", "m", None)]

    def inputs(batch: int, n: int, m: int) -> list[torch.Tensor]:
        return [torch.randn(batch, n, 8), torch.randn(batch, m, 8)]

    with torch.no_grad():
        hints = general_hints({"b": 1, "n": 5, "m": 7}, torch.device("cpu"))
        function = lambda each, *x: type(each).forward(each, *x)  # noqa: E731
        region = lowering.compile_trace(trace(function, module, inputs(1, 5, 7), dims, hints, oblivious))
        for sizes in ((2, 5, 7), (3, 9, 2)):
            x = inputs(*sizes)
            torch.testing.assert_close(region(weight_inputs(weight_slots(module)), x), module(*x))
