"""Launching a kernel, and choosing one of its configurations without measuring them again."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._inductor.runtime.cache_dir_utils import cache_dir

from compile_cache.backends.inductor.compile import lowering
from compile_cache.backends.inductor.compile.compiled_region import KernelByAddress


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
