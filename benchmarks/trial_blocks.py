"""Regions of SDXL, Flux and LTX with random weights and the inputs of a call, through the pack's own adapters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from .family_models import family
from .parity import make_unet, randomized
from .regions import UNET

# How often a step runs each block: SDXL's UNet, and Flux with 10 and 20 blocks.
COUNTS = {
    "SDXL BasicTransformerBlock 1280": 60, "SDXL BasicTransformerBlock 640": 10, "SDXL SpatialTransformer.exit 640": 5,
    "SDXL SpatialTransformer.exit 1280": 6, "SDXL ResBlock 640 to 320": 2, "SDXL ResBlock 320 to 320": 2,
    "SDXL ResBlock 2560 to 1280": 2, "Flux SingleStreamBlock": 20, "Flux DoubleStreamBlock": 10,
    "LTX BasicTransformerBlock": 28,
}  # fmt: skip


def sites_of(module: Any, provider: Any, call: Callable[[], Any]) -> Iterator[tuple[Any, list[Any]]]:
    """Each region that a call runs, with its inputs."""
    from resolute_pack.compile_cache.backends.inductor.compile.tracing import region_format
    from resolute_pack.compile_cache.regions.site import installed

    found: list[tuple[Any, list[Any]]] = []

    def run(site: Any, *tensors: Any) -> Any:
        given = [
            t.clone().contiguous(memory_format=region_format(t, dims))
            for t, dims in zip(tensors, site.dims, strict=True)
        ]
        found.append((site, given))
        return site.function(site.module, *tensors)

    with installed(provider.hooks(module, run, lambda reason: None)):
        call()
    return iter(found)


def sdxl_blocks(device: str) -> Iterator[tuple[str, Any, list[Any]]]:
    import torch
    from resolute_pack.nodes.adapters.blocks.unets import unet  # type: ignore[import-not-found]

    model, side = make_unet(1.0, device, UNET), 128 if device == "cuda" else 16

    def noise(*shape: int) -> Any:
        return torch.randn(*shape, device=device).half()

    def call() -> Any:
        time_of = torch.full((2,), 500.0, device=device)
        return model._forward(noise(2, 4, side, side), time_of, noise(2, 77, 2048), noise(2, 2816), None, {})

    names = set()
    for site, inputs in sites_of(model, unet, call):
        channels = inputs[-1].shape[-1] if site.kind.endswith("exit") else inputs[0].shape[-1]
        if site.kind == "ResBlock":
            channels = f"{site.module.channels} to {site.module.out_channels}"
        if site.kind == "BasicTransformerBlock":
            channels = inputs[0].shape[-1]
        name = f"SDXL {site.kind} {channels}"
        if name in COUNTS and name not in names:
            names.add(name)
            yield name, site, inputs


def flux_blocks(device: str) -> Iterator[tuple[str, Any, list[Any]]]:
    import torch

    side, text = (128, 512) if device == "cuda" else (16, 32)

    def call(model: Any, noise: Callable[..., Any]) -> Any:
        given = noise(1, 16, side, side), torch.full((1,), 0.5, device=device), noise(1, text, 4096), noise(1, 768)
        return model._forward(*given, guidance=torch.full((1,), 3.5, device=device), transformer_options={})

    return transformer_blocks("flux", "Flux", device, call)


def ltx_blocks(device: str) -> Iterator[tuple[str, Any, list[Any]]]:
    """97 frames of 768x512, and a mask over half of the text."""
    import torch

    frames, height, width = (13, 16, 24) if device == "cuda" else (2, 2, 3)

    def call(model: Any, noise: Callable[..., Any]) -> Any:
        given = noise(1, 128, frames, height, width), torch.full((1,), 0.5, device=device), noise(1, 256, 4096)
        return model._forward(*given, (torch.arange(256, device=device) < 128)[None].long())

    return transformer_blocks("ltx", "LTX", device, call)


def transformer_blocks(
    name: str, title: str, device: str, call: Callable[[Any, Callable[..., Any]], Any]
) -> Iterator[tuple[str, Any, list[Any]]]:
    """The kinds of blocks of a network with two of each."""
    from importlib import import_module

    import comfy.ops
    import torch
    from resolute_pack.nodes.adapters.blocks.transformers import recognise  # type: ignore[import-not-found]

    found = family(name, device == "cpu")
    module, _, network = f"comfy.ldm.{found.network}".rpartition(".")
    settings = {key: value for key, value in found.settings.items() if key != "image_model"}
    settings |= dict.fromkeys(found.layers, 2)
    kinds = {"dtype": torch.bfloat16, "device": device, "operations": comfy.ops.disable_weight_init}
    model = randomized(getattr(import_module(module), network)(**settings, **kinds))

    def noise(*shape: int) -> Any:
        return torch.randn(*shape, device=device).bfloat16()

    names = set()
    for site, inputs in sites_of(model, recognise, lambda: call(model, noise)):
        label = f"{title} {site.kind}"
        if label in COUNTS and label not in names:
            names.add(label)
            yield label, site, inputs


BLOCKS = {"Flux": flux_blocks, "LTX": ltx_blocks, "SDXL": sdxl_blocks}
