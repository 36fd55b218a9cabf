"""The regions of the bundled models, at their real width, for `cards` to compile.

Models are on the device "meta", so they take no memory and nothing is computed. MiniMax H3 and LTX-2, which read
numbers from their inputs, and weights in int8 run on the CPU, one layer on a small latent, before they move to "meta".
Models with "-node-" in their names are quantized by Load Diffusion Model (Faster Format).
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from scripts.models.architectures import SD15, SDXL, VAE
from scripts.places import ROOT

from .family_models import FAMILIES, Family, family, step_inputs

SHALLOW = {
    "transformer_depth": [0, 0, 1, 1, 1, 1], "transformer_depth_middle": 1,
    "transformer_depth_output": [0, 0, 0, 1, 1, 1, 1, 1, 1],
}  # fmt: skip
LTX2 = FAMILIES["ltx"]._replace(network="lightricks.av_model.LTXAVModel", settings={}, width=7680, padding=0)
SMALL = (128, 128)  # pixels
FORMS = ("int8", "fp8", "fp8-emulated")


def load_pack() -> Any:
    """Import the pack by path as the module `resolute_pack`, as ComfyUI does."""
    comfyui = Path(os.environ.get("COMFYUI_PATH") or ROOT / ".comfyui")
    sys.path.insert(0, str(comfyui))
    spec = importlib.util.spec_from_file_location(
        "resolute_pack", ROOT / "__init__.py", submodule_search_locations=[str(ROOT)]
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["resolute_pack"] = module
    spec.loader.exec_module(module)
    return module


def regions(wanted: str) -> Iterator[tuple[str, Any, list[Any]]]:
    """(name, site, inputs) of the first region of each kind and width. Inputs are fake tensors on the described card.

    wanted: a regular expression for the names, which begin with a model's name.
    """
    sys.argv = sys.argv[:1]
    load_pack()
    import comfy.cli_args
    import torch

    comfy.cli_args.args.cpu = comfy.cli_args.args.use_pytorch_cross_attention = True
    available, torch.cuda.is_available = torch.cuda.is_available, lambda: False  # ComfyUI would query the GPU's memory
    makers = _makers()
    torch.cuda.is_available = available
    torch.equal = lambda before, after: after._version == 0  # a hook asks if a block wrote to copies of its inputs
    found = {}
    is_node = "-node-" in wanted  # these models take minutes, so run only them
    for model, make in makers.items():
        for site, inputs in make() if not wanted or ("-node-" in model) == is_node else ():
            width = "".join(f" {n}" for n, dim in zip(inputs[0].shape, site.dims[0], strict=True) if dim is None)
            given = getattr(site.module, "out_channels", None) if site.kind in ("ResBlock", "ResnetBlock") else None
            width += f" to {given}" if given else ""
            found.setdefault(f"{model} {site.kind}{width}", (site, inputs))
    for name, (site, inputs) in found.items():
        if re.match(wanted, name):
            with torch._subclasses.FakeTensorMode():
                fakes = [torch.empty(each.shape, dtype=each.dtype, device="cuda:0") for each in inputs]
            yield name, site, fakes


def _makers() -> dict[str, Callable[[], list[tuple[Any, list[Any]]]]]:
    """By model name: a function that returns all regions of a call of the model, with their inputs."""
    import comfy.cldm.cldm as controlnets
    import comfy.ldm.lightricks.vae.causal_video_autoencoder as ltx
    import comfy.ldm.modules.diffusionmodules.model as autoencoder
    import comfy.ldm.modules.diffusionmodules.openaimodel as openaimodel
    import comfy.ldm.wan.vae as wan
    import comfy.model_management
    import comfy.ops
    import torch
    from resolute_pack.compile_cache.keys import Role  # type: ignore[import-not-found]
    from resolute_pack.compile_cache.modules.region_weights import (  # type: ignore[import-not-found]
        weight_layouts,
        weight_slots,
    )
    from resolute_pack.nodes.adapters.blocks import vaes  # type: ignore[import-not-found]
    from resolute_pack.nodes.adapters.formats import faster_format, quantized_weight  # type: ignore[import-not-found]

    from .video_models import VAES

    def empty(dtype: Any, *shapes: Any) -> list[Any]:
        return [torch.empty(shape, dtype=dtype, device="meta") for shape in shapes]

    ltx.get_max_chunk_size = lambda device: ltx.MAX_CHUNK_SIZE  # it queries the card's memory
    comfy.model_management.intermediate_device = lambda: torch.device("meta")
    kinds = {"dtype": torch.half, "device": "meta", "operations": comfy.ops.disable_weight_init}

    def unet(settings: dict[str, Any], text: int, pooled: int, form: str = "") -> Any:
        def made(**more: Any) -> Any:
            return openaimodel.UNetModel(**{"out_channels": 4, **settings}, **kinds | more).eval().requires_grad_(False)

        model, side = (in_form(made, torch.half, form), 8) if form else (made(), 128)
        x, context, step = empty(torch.half, (2, 4, side, side), (2, 77, text), (2,))
        y = empty(torch.half, (2, pooled))[0] if pooled else None
        if form:
            x, context, step, y = (torch.zeros(each.shape, dtype=each.dtype) for each in (x, context, step, y))
        return quantized(_sites(model, Role.UNET, lambda: model._forward(x, step.float(), context, y, None, {})), form)

    def quantize_few_rows(name: str, weight: Any, device: Any) -> Any:
        """Quantize a few rows and repeat them: values do not matter, and a whole weight takes seconds."""
        made, error = quantized_weight.quantized(name, weight[:16], device)
        rows = weight.shape[0] // 16
        return {key: each.repeat(rows, 1) if each.ndim == 2 else each for key, each in made.items()}, error

    def in_form(made: Callable[..., Any], dtype: Any, form: str) -> Any:
        """A model on the CPU, loaded as by Load Diffusion Model (Faster Format); fp8-emulated: without fp8."""
        quantizer = faster_format.Quantizer(torch.device("cpu"), lambda weight: form.removesuffix("-emulated"))
        shapes = made(device="meta", operations=comfy.ops.manual_cast)
        weights = {key: torch.full(each.shape, 0.02, dtype=each.dtype) for key, each in shapes.state_dict().items()}
        with mock.patch.object(faster_format, "quantized", quantize_few_rows):
            for name, _ in shapes.named_modules():
                quantizer(weights, f"{name}.")
        disabled = {"float8_e4m3fn"} if form.endswith("-emulated") else set()
        model = made(device="cpu", operations=comfy.ops.mixed_precision_ops({}, dtype, disabled=disabled))
        model.load_state_dict(weights, strict=False)
        return model

    def quantized(found: list[Any], form: str) -> list[Any]:
        """For a format, only the regions with quantized weights, their modules moved to "meta"."""
        found = [each for each in found if not form or any(weight_layouts(weight_slots(each[0].module)))]
        for site, _ in found if form else ():
            site.module.to("meta")
        return found

    def controlnet() -> Any:
        settings = {name: value for name, value in {**SDXL, **SHALLOW}.items() if name != "transformer_depth_output"}
        model = controlnets.ControlNet(**settings, hint_channels=3, **kinds).eval().requires_grad_(False)
        x, hint, text, y, step = empty(torch.half, (2, 4, 128, 128), (2, 3, 1024, 1024), (2, 77, 2048), (2, 2816), (2,))
        return _sites(model, Role.CONTROLNET, lambda: model(x, hint, step.float(), text, y))

    def network(about: Family, dtype: Any, operations: Any, device: str) -> Any:
        module, _, kind = about.network.rpartition(".")
        settings = {**about.settings, **dict.fromkeys(about.layers, 1), "dtype": dtype, "operations": operations}
        model = getattr(importlib.import_module(f"comfy.ldm.{module}"), kind)(**settings, device=device)
        return model.to(device).eval().requires_grad_(False)  # LTX makes its table on the CPU

    def transformer(name: str, dtype: Any, operations: Any) -> Any:
        about = family(name)
        model = network(about, dtype, operations, "meta")
        given = step_inputs(model, about, *about.sizes[0])
        return _sites(model, Role.UNET, lambda: model(**given))

    def on_cpu(about: Family, form: str = "") -> Any:
        made = functools.partial(network, about, torch.bfloat16)
        model = in_form(made, torch.bfloat16, form) if form else made(casting, "cpu")
        given = step_inputs(model, about._replace(tokens=16) if form else about, *SMALL)
        if about is LTX2:  # a video and its sound
            given["x"] = [given["x"], torch.zeros((1, 8, 16, 16), dtype=torch.bfloat16)]
        found = _sites(model, Role.UNET, lambda: model(**given))
        model.to("meta")
        return quantized(found, form)

    def module_of(kind: Any, settings: Mapping[str, Any], dtype: Any, device: str = "meta") -> Any:
        torch.set_default_dtype(dtype)
        with torch.device(device):
            model = kind(**settings).eval().requires_grad_(False)
        torch.set_default_dtype(torch.float32)
        return model.to("meta")

    def coder(model: Any, dtype: Any, method: str, *shape: int) -> Any:
        role = Role.VAE_ENCODE if shape[1] == 3 else Role.VAE_DECODE
        more = {"timestep": 0.05} if getattr(model, "timestep_conditioning", False) else {}  # LTX
        return _sites(model, role, lambda: getattr(model, method)(*empty(dtype, shape), **more))

    def video(name: str, dtype: Any, *shape: int) -> Any:
        place, _, kind = VAES[name].kind.rpartition(".")
        device = "cpu" if name == "cosmos" else "meta"  # its constructor reads a number
        model = module_of(getattr(importlib.import_module(place), kind), VAES[name].settings, dtype, device)
        part, _, method = (vaes.method_of(model, Role.VAE_DECODE) or "").rpartition(".")
        return coder(model.get_submodule(part), dtype, method, 1, *shape)

    decode, encode, latent, image = autoencoder.Decoder, autoencoder.Encoder, (1, 4, 128, 128), (1, 3, 1024, 1024)
    plain, casting = comfy.ops.disable_weight_init, comfy.ops.manual_cast
    others = [name for name in FAMILIES if name not in {"flux", "minimax-h3"}]
    return {
        "SDXL": lambda: unet({**SDXL, **SHALLOW}, 2048, 2816),
        "SD15": lambda: unet(SD15, 768, 0),
        "SDXL-ControlNet": controlnet,
        "Flux": lambda: transformer("flux", torch.bfloat16, plain),
        "Flux-fp8": lambda: transformer("flux", torch.float8_e4m3fn, casting),
        **{name: lambda name=name: transformer(name, torch.bfloat16, plain) for name in others},  # type: ignore[misc]
        "MiniMax-H3": lambda: on_cpu(FAMILIES["minimax-h3"]),
        "LTX-2": lambda: on_cpu(LTX2),
        "Z-Image-int8": lambda: on_cpu(FAMILIES["z-image"], "int8"),
        **{f"Flux-node-{form}": lambda form=form: on_cpu(FAMILIES["flux"], form) for form in FORMS},  # type: ignore[misc]
        **{  # type: ignore[misc]
            f"SDXL-node-{form}": lambda form=form: unet({**SDXL, **SHALLOW}, 2048, 2816, form) for form in FORMS
        },
        "VAE-fp16": lambda: coder(module_of(decode, VAE, torch.half), torch.half, "forward", *latent),
        "VAE-bf16": lambda: coder(module_of(decode, VAE, torch.bfloat16), torch.bfloat16, "forward", *latent),
        "VAE-encode": lambda: coder(module_of(encode, VAE, torch.bfloat16), torch.bfloat16, "forward", *image),
        "HunyuanVideo-VAE": lambda: video("hunyuan", torch.bfloat16, 16, 7, 45, 80),
        "HunyuanVideo-1.5-VAE": lambda: video("hunyuan15", torch.half, 32, 7, 23, 40),
        "Wan-2.2-VAE": lambda: video("wan22", torch.bfloat16, 48, 4, 44, 80),
        "Cosmos-VAE": lambda: video("cosmos", torch.bfloat16, 16, 3, 44, 80),
        "Mochi-VAE": lambda: video("mochi", torch.bfloat16, 12, 3, 60, 106),
        "LTX-VAE": lambda: video("ltx", torch.bfloat16, 128, 5, 16, 24),
        "MiniMax-H3-VAE": lambda: video("h3", torch.bfloat16, 24, 4, 30, 54),
        "Wan-VAE": lambda: video("wan", torch.bfloat16, 16, 9, 60, 104),
        "Wan-VAE-encode": lambda: coder(
            module_of(wan.WanVAE, VAES["wan"].settings, torch.bfloat16), torch.bfloat16, "encode", 1, 3, 33, 480, 832
        ),
    }


def _sites(module: Any, role: Any, call: Callable[[], Any]) -> list[tuple[Any, list[Any]]]:
    """Each region that a call runs, with its inputs."""
    from resolute_pack.compile_cache.modules.site import installed, take_donated  # type: ignore[import-not-found]
    from resolute_pack.nodes.adapters.blocks.families import hooks_of  # type: ignore[import-not-found]

    found: list[tuple[Any, list[Any]]] = []

    def run(site: Any, *inputs: Any) -> Any:
        tensors = take_donated(inputs)
        found.append((site, tensors))
        return site.function(site.module, *tensors)

    with installed(hooks_of(module, role, run, lambda reason: None)):
        call()
    return found
