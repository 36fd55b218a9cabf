"""How often each of core's samplers asks the GPU for a noise level: counted, by operator, as sampling runs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from scripts.places import ROOT

STEPS = (6, 10)  # what differs is of four steps
ADAPTIVE = {"dpm_fast", "dpm_adaptive"}  # their steps are not those of the noise levels


class Reads(TorchDispatchMode):
    """Counts numbers that the host takes from tensors, except from copies that are on the host anyway."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.is_on_host = 0, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default and not self.is_on_host
        return func(*args, **(kwargs or {}))


class Sampling:
    """Stands in for core's model_sampling, as far as samplers use it."""

    sigma_min, sigma_max = torch.tensor(0.03), torch.tensor(14.6)

    def percent_to_sigma(self, percent: float) -> float:
        return 14.6 * (1 - percent)

    def timestep(self, sigma: torch.Tensor) -> torch.Tensor:
        return sigma * 60

    def noise_scaling(self, sigma: torch.Tensor, noise: torch.Tensor, latent: torch.Tensor) -> torch.Tensor:
        return noise * sigma.view(-1, 1, 1, 1) + latent


class Model:
    """A network without a weight, in the places where samplers look for it."""

    def __init__(self) -> None:
        sampling = Sampling()
        patcher = SimpleNamespace(get_model_object=lambda name: sampling, model_options={})
        model = SimpleNamespace(model_sampling=sampling)
        self.inner_model = SimpleNamespace(inner_model=model, model_patcher=patcher, model_sampling=sampling)
        self.latent_image = self.noise = None

    def __call__(self, x: torch.Tensor, sigma: torch.Tensor, model_options: Any = None, **_: Any) -> torch.Tensor:
        assert type(sigma) is torch.Tensor  # what the model gets is plain
        denoised = torch.tanh(x) * 0.5
        for after in (model_options or {}).get("sampler_post_cfg_function", []):
            denoised = after({"denoised": denoised, "uncond_denoised": denoised * 0.9, "cond_denoised": denoised})
        return denoised


@pytest.fixture(scope="module")
def values(core: SimpleNamespace) -> ModuleType:
    module: ModuleType = core.ours("sampling.host_values")
    return module


@pytest.fixture
def run(
    core: SimpleNamespace, values: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., tuple[torch.Tensor, int]]]:
    reads = Reads()
    answer = values.read

    def counted(func: Any, host: torch.Tensor) -> Any:
        reads.is_on_host = True
        try:
            return answer(func, host)
        finally:
            reads.is_on_host = False

    monkeypatch.setattr(values, "read", counted)

    def run(name: str, steps: int, with_values: bool) -> tuple[torch.Tensor, int]:
        sigmas = torch.cat([torch.linspace(14.6, 0.03, steps), torch.zeros(1)])
        given = values.HostValues.of(sigmas) if with_values else sigmas
        sampler = core.comfy.samplers.sampler_object(name)
        torch.manual_seed(0)
        x, before = torch.randn(1, 4, 8, 8) * 14.6, reads.count
        with torch.no_grad(), reads:
            extra = {"seed": 1, "model_options": {}, "denoise_mask": None}
            result = sampler.sampler_function(
                Model(), x, given, extra_args=extra, callback=None, disable=True, **sampler.extra_options
            )
        return result, reads.count - before

    yield run


@pytest.fixture
def names(core: SimpleNamespace) -> list[str]:
    found: list[str] = core.comfy.samplers.SAMPLER_NAMES
    return [name for name in found if name not in ADAPTIVE]


def per_step(run: Callable[..., tuple[torch.Tensor, int]], name: str, with_values: bool) -> float:
    few, many = (run(name, steps, with_values)[1] for steps in STEPS)
    return (many - few) / (STEPS[1] - STEPS[0])


@pytest.mark.filterwarnings("ignore:Should have t")
def test_the_page_of_limits_has_the_count_of_each_sampler(run: Any, names: list[str]) -> None:
    page = (ROOT / "docs" / "limits.md").read_text("utf-8")
    rows = re.findall(r"^\| ([a-z0-9_, ]+) \| (\d+) \| (\d+) \|$", page, re.MULTILINE)
    documented = {name: (int(b), int(a)) for cell, b, a in rows for name in cell.split(", ")}
    counted = {name: (per_step(run, name, False), per_step(run, name, True)) for name in names}
    assert {name: each for name, each in counted.items() if name in documented} == documented
    assert set(counted) <= set(documented)


@pytest.mark.filterwarnings("ignore:Should have t")
def test_every_sampler_computes_the_same(run: Any, names: list[str]) -> None:
    for name in (*names, *ADAPTIVE):
        assert torch.equal(run(name, 7, True)[0], run(name, 7, False)[0]), name


def test_only_cores_own_samplers_get_them(
    core: SimpleNamespace, values: ModuleType, monkeypatch: pytest.MonkeyPatch, names: list[str]
) -> None:
    overlap = core.ours("sampling.step_overlap")
    executor = core.comfy.patcher_extension.WrapperExecutor
    guider = SimpleNamespace(model_patcher=SimpleNamespace(load_device=torch.device("cuda")), conds={})
    given: list[Any] = []

    def sigmas_of(sampler: Any) -> type:
        sampler.sample = lambda guider, sigmas, *_: given.append(sigmas)
        wrappers = [overlap.overlap_steps]
        executor.new_class_executor(sampler.sample, sampler, wrappers).execute(
            guider, torch.ones(3), {"model_options": {}}, None
        )
        return type(given[-1])

    for name in (*names, *ADAPTIVE):
        assert sigmas_of(core.comfy.samplers.sampler_object(name)) is values.HostValues, name

    def own(*_: Any, **__: Any) -> None:
        pass

    assert sigmas_of(core.comfy.samplers.KSAMPLER(own)) is torch.Tensor
    assert sigmas_of(SimpleNamespace(sampler_function=core.comfy.k_diffusion.sampling.sample_heun)) is torch.Tensor


def test_numbers_are_read_from_the_host_until_something_is_written(values: ModuleType) -> None:
    plain = torch.tensor([3.0, 2.0, 0.0])
    kept = values.HostValues.of(plain.clone())
    assert bool(kept[-1] == 0) and not bool(kept[0] == 0)
    assert (float(kept[1]), kept[0].item(), kept.tolist()) == (3.0 - 1.0, 3.0, [3.0, 2.0, 0.0])
    assert torch.equal(kept.cpu(), plain) and type(kept.cpu()) is torch.Tensor
    down = (kept[0] ** 2 - kept[1] ** 2) ** 0.5
    assert type(down) is type(kept) and float(down) == float((plain[0] ** 2 - plain[1] ** 2) ** 0.5)
    assert type(kept[0].log()) is torch.Tensor and type(kept * torch.ones(3)) is torch.Tensor
    assert type(kept[0] ** 3) is torch.Tensor
    copied, view = kept.clone(), kept[1:]
    view[-1] = 5.0
    assert (float(kept[-1]), float(view[-1]), float(copied[-1])) == (5.0, 5.0, 0.0)
    copied.mul_(2)
    assert copied.tolist() == [6.0, 4.0, 0.0]
