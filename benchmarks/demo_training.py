"""Training loops of the demo's VAE and UNet; they stop after a given time. Needs ComfyUI's modules to be importable."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import comfy.ldm.models.autoencoder as autoencoder
import comfy.ldm.modules.diffusionmodules.openaimodel as openaimodel
import comfy.model_sampling
import comfy.ops
import torch

from scripts.models.demo_model import networks

from . import pictures

Size = tuple[int, int]  # width, height in pixels
Say = Callable[[str], None]
CAPTION_DROPOUT, WORD_DROPOUT = 0.12, 0.03
KL_WEIGHT = 5e-4
# Hang et al. 2023 (arXiv 2303.09556): without this limit the almost noiseless steps dominate the gradient.
MIN_SNR = 5.0
# Initialised to zero: the last layer of each residual branch, so that a block starts as the identity, and the UNet's
# output.
_LAST_LAYERS = ("out_layers.3.weight", "proj_out.weight", "conv2.weight", "unet.out.2.weight")


@dataclass(slots=True)
class Clock:
    """Learning rate over time: a short warm-up, then half a cosine down to zero at the end."""

    seconds: float
    rate: float
    start: float = field(default_factory=time.monotonic)
    warm_up: int = 200

    @property
    def passed(self) -> float:
        """Fraction of the time that has passed; 1 or more after the end."""
        return (time.monotonic() - self.start) / self.seconds

    def rate_at(self, step: int) -> float:
        return self.rate * min(1.0, (step + 1) / self.warm_up) * 0.5 * (1 + math.cos(math.pi * min(1.0, self.passed)))


class Average:
    """Exponential moving average of parameters; `apply` replaces them by the average."""

    def __init__(self, parameters: Iterable[torch.Tensor], decay: float) -> None:
        self._parameters, self._decay = list(parameters), decay
        self._average = [parameter.detach().clone() for parameter in self._parameters]

    @torch.no_grad()
    def update(self, step: int) -> None:
        decay = min(self._decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(self._average, [p.detach() for p in self._parameters], 1 - decay)

    @torch.no_grad()
    def apply(self) -> None:
        for parameter, average in zip(self._parameters, self._average, strict=True):
            parameter.copy_(average)


def learn(
    what: str,
    parameters: list[torch.nn.Parameter],
    minutes: float,
    rate: float,
    losses: Iterator[torch.Tensor],
    say: Say,
) -> list[dict[str, float]]:
    """Train on each loss until the time is over, then set the averaged weights. Returns a log entry for every 5 %."""
    fused = parameters[0].is_cuda
    optimizer = torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.99), weight_decay=1e-4, fused=fused)
    average, clock = Average(parameters, 0.999), Clock(minutes * 60, rate)
    log: list[dict[str, float]] = []
    recent: list[torch.Tensor] = []
    for step, loss in enumerate(losses):
        for group in optimizer.param_groups:
            group["lr"] = clock.rate_at(step)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
        optimizer.step()
        average.update(step)
        recent.append(loss.detach())
        if clock.passed >= 0.05 * (len(log) + 1):
            mean = float(torch.stack(recent).mean())
            if not math.isfinite(mean):
                raise RuntimeError(f"The loss of {what} is {mean} at step {step}.")
            log.append({"step": step + 1, "seconds": round(time.monotonic() - clock.start, 1), "loss": mean})
            say(f"  {what}: step {step + 1}, {log[-1]['seconds']:.0f} s, loss {mean:.4f}")
            recent.clear()
        if clock.passed >= 1:
            break
    average.apply()
    return log


def initialise(module: torch.nn.Module, generator: torch.Generator) -> None:
    """Set weights, which ComfyUI leaves uninitialised: variance-preserving noise, zero for _LAST_LAYERS."""
    for name, weight in module.named_parameters():
        with torch.no_grad():
            if weight.ndim < 2:
                weight.fill_(0.0 if name.endswith("bias") else 1.0)
            elif name.endswith(_LAST_LAYERS):
                weight.zero_()
            else:
                noise = torch.randn(weight.shape, generator=generator) * math.prod(weight.shape[1:]) ** -0.5
                weight.copy_(noise)


# ---- VAE


def new_vae(device: Any, generator: torch.Generator) -> Any:
    """An untrained AutoencoderKL."""
    vae = autoencoder.AutoencoderKL(ddconfig=dict(networks.VAE), embed_dim=networks.VAE["z_channels"])
    initialise(vae, generator)
    return vae.to(device)


def vae_losses(vae: Any, sizes: list[Size], pixels: int, device: Any) -> Iterator[torch.Tensor]:
    """Losses of batches of about ``pixels`` pixels: L1 + L2 error of the image, plus the latents' KL divergence."""
    seed = 0
    while True:
        width, height = sizes[seed % len(sizes)]
        count = max(2, pixels // (width * height))
        x = 2 * pictures.draw(pictures.scenes(seed, count, 1 + seed % 3 // 2), width, height, device) - 1
        seed += 1
        mean, logarithm = vae.quant_conv(vae.encoder(x)).chunk(2, dim=1)
        logarithm = logarithm.clamp(-30, 20)
        noise = torch.randn(mean.shape, device=device)
        decoded = vae.decoder(vae.post_quant_conv(mean + noise * (0.5 * logarithm).exp()))
        divergence = 0.5 * (mean.square() + logarithm.exp() - 1 - logarithm).mean()
        yield (decoded - x).abs().mean() + (decoded - x).square().mean() + KL_WEIGHT * divergence


@torch.no_grad()
def normalise(vae: Any, latents: torch.Tensor, scale: float) -> dict[str, list[float]]:
    """Fold a factor and an offset per channel into the two 1x1 convolutions around the latents.

    Afterwards latents times ``scale``, which is what ComfyUI samples, have mean 0 and deviation 1 per channel.
    """
    mean = latents.mean((0, 2, 3))
    deviation = latents.std((0, 2, 3))
    factor = 1 / (deviation * scale)
    channels = len(mean)
    quant, post = vae.quant_conv, vae.post_quant_conv
    quant.weight[:channels] *= factor.view(-1, 1, 1, 1)
    quant.bias[:channels] = (quant.bias[:channels] - mean) * factor
    quant.bias[channels:] += 2 * factor.log()
    post.bias += (post.weight[:, :, 0, 0] * mean).sum(1)
    post.weight /= factor.view(1, -1, 1, 1)
    return {"mean": mean.tolist(), "deviation": deviation.tolist()}


@torch.no_grad()
def encode(vae: Any, x: torch.Tensor) -> torch.Tensor:
    """Encode images (0 to 1) to the means of their latents."""
    mean: torch.Tensor = vae.quant_conv(vae.encoder(2 * x - 1)).chunk(2, dim=1)[0]
    return mean


# ---- UNet


@dataclass(slots=True)
class Dataset:
    """Encoded images of one size and number of objects: latents (n, 4, h, w) and words (n, phrases, 4)."""

    latents: torch.Tensor
    words: torch.Tensor


def encode_many(vae: Any, sizes: list[Size], minutes: float, pixels: int, scale: float, device: Any) -> list[Dataset]:
    """Draw and encode images until the time is over, cycling through sizes and numbers of objects."""
    kinds = [(size, objects) for size in sizes for objects in (1, 2)]
    batches: dict[Any, list[Dataset]] = {kind: [] for kind in kinds}
    clock, seed = Clock(minutes * 60, 1.0), 1_000_000
    while clock.passed < 1 or seed < 1_000_000 + len(kinds):
        (width, height), objects = kind = kinds[seed % len(kinds)]
        scenes = pictures.scenes(seed, max(4, pixels // (width * height)), objects)
        latents = encode(vae, pictures.draw(scenes, width, height, device)) * scale
        batches[kind].append(Dataset(latents, pictures.caption_numbers(scenes).to(device)))
        seed += 1
    return [
        Dataset(torch.cat([part.latents for part in parts]), torch.cat([part.words for part in parts]))
        for parts in batches.values()
    ]


class Denoiser(torch.nn.Module):
    """UNet and caption encoder, trained together to predict the noise at ComfyUI's own discrete sigmas."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        operations = comfy.ops.disable_weight_init
        self.unet = openaimodel.UNetModel(**networks.UNET, dtype=torch.float32, operations=operations)
        self.text = networks.CaptionEncoder()
        initialise(self, generator)
        # Embedding vectors are looked up, not multiplied, so fan-in does not apply.
        for table in (self.text.own.weight, self.text.shared.weight):
            torch.nn.init.normal_(table, std=0.5, generator=generator)
        sigmas = comfy.model_sampling.ModelSamplingDiscrete().sigmas
        self.register_buffer("signal", 1 / (1 + sigmas.float().square()), persistent=False)

    def loss(self, latents: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        """The weighted mean square error of the predicted noise; drops captions and single words at random."""
        count, device = len(latents), latents.device
        dropped = torch.rand((count, 1, 1), device=device) < CAPTION_DROPOUT
        words = words.masked_fill(dropped | (torch.rand(words.shape, device=device) < WORD_DROPOUT), 0)
        steps = torch.randint(0, len(self.signal), (count,), device=device)
        signal = self.signal[steps].view(-1, 1, 1, 1)
        noise = torch.randn(latents.shape, device=device)
        noisy = latents * signal.sqrt() + noise * (1 - signal).sqrt()
        predicted = self.unet(noisy, steps, self.text(words), transformer_options={})
        ratio = signal.flatten() / (1 - signal.flatten())
        weight = ratio.clamp(max=MIN_SNR) / ratio
        return ((predicted - noise).square().mean((1, 2, 3)) * weight).mean()


def denoiser_losses(model: Denoiser, datasets: list[Dataset], positions: int, limit: int) -> Iterator[torch.Tensor]:
    """Losses of batches from one dataset each: about ``positions`` latent positions, at most ``limit`` images."""
    generator = torch.Generator().manual_seed(1)
    while True:
        dataset = datasets[int(torch.randint(len(datasets), (1,), generator=generator))]
        height, width = dataset.latents.shape[-2:]
        count = max(2, min(limit, positions // (height * width)))
        chosen = torch.randint(len(dataset.latents), (count,), device=dataset.latents.device)
        yield model.loss(dataset.latents[chosen], dataset.words[chosen])
