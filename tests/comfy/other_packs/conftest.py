"""Real ComfyUI in this process, a tiny model and VAE, and what a sampling run or a decode does and says."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture
def bench(core: SimpleNamespace, caplog: pytest.LogCaptureFixture) -> Bench:
    return Bench(core, caplog)


class Bench:
    """Builds, compiles with the backend that runs core's own code, samples and decodes."""

    def __init__(self, core: SimpleNamespace, caplog: pytest.LogCaptureFixture) -> None:
        self.core, self.caplog = core, caplog
        caplog.set_level(logging.INFO)
        self.stats = core.ours("process.runtime").cache().stats

    def model(self) -> Any:
        """A tiny UNet of the SD1.5 family, as a loader gives it."""
        return self.core.tiny_model().build(0, "sd")[0]

    def vae(self) -> Any:
        """A small AutoencoderKL, as a loader gives it."""
        return importlib.import_module("resolute_tiny_models.models").ResoluteTestTinyVAE().build(0)[0]

    def compiled(self, model: Any) -> Any:
        return self.core.ours("patch.diffusion_model").compile_diffusion_model(model, "eager", None)

    def compiled_vae(self, vae: Any) -> Any:
        return self.core.ours("patch.vae").compile_vae_decode(vae, "eager", None)

    def sample(self, model: Any, steps: int = 3, callback: Any = None) -> torch.Tensor:
        """Latents (1, 4, 8, 8) without guidance: one call of the model in each step. callback: as in core."""
        self.caplog.clear()
        latent = torch.zeros((1, 4, 8, 8))
        generator = torch.Generator().manual_seed(1)
        condition = [[torch.randn((1, 77, 768), generator=generator), {}]]
        noise = self.core.comfy.sample.prepare_noise(latent, 5)
        samples: torch.Tensor = self.core.comfy.sample.sample(
            model,
            noise,
            steps,
            1.0,
            "euler",
            "normal",
            condition,
            condition,
            latent,
            callback=callback,
            disable_pbar=True,
            seed=5,
        )
        return samples

    def decode(self, vae: Any) -> torch.Tensor:
        """A picture (1, 64, 64, 3)."""
        image: torch.Tensor = vae.decode(torch.randn((1, 4, 8, 8), generator=torch.Generator().manual_seed(2)))
        return image

    def unload(self) -> None:
        self.core.comfy.model_management.unload_all_models()

    def bypasses(self) -> int:
        """How often something ran in place of a forward of ours, since the process started."""
        return int(self.stats.counters.bypasses["replaced_forward"])

    @property
    def summary(self) -> str:
        """What the last sampling run said about itself."""
        return [record.getMessage() for record in self.caplog.records][-1]
