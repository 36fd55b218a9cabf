"""Measures the relative error of one UNet call, by backend and size, against eager fp16 and against fp32.

    python -m benchmarks.parity [--out FILE]

A full SDXL UNet with random weights runs in this process with ComfyUI's modules (COMFYUI_PATH or `.comfyui`), through
the pack's own adapters. Two kinds of weights: `random` preserves variance in every layer, which amplifies rounding more
than a trained network does; `damped` scales the last layer of each residual branch by 0.2, because training starts
those at zero and leaves them small. Needs CUDA.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

from scripts.models.architectures import SDXL
from scripts.places import ROOT

from . import rig

SIZES = [(1024, 1024, 2, 77), (960, 720, 2, 77), (720, 720, 2, 77), (264, 200, 1, 154), (256, 256, 2, 77)]


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


def load_pack_for_device() -> str:
    """Import the pack, and ComfyUI for the GPU, or for the CPU if there is none. Returns the device type."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    sys.argv = [sys.argv[0], *(["--cpu"] if device == "cpu" else [])]
    load_pack()
    import comfy.options

    comfy.options.enable_args_parsing()  # without this, ComfyUI ignores --cpu
    return device


# The last layer of each residual branch of a UNetModel.
LAST_LAYERS = ("out_layers.3.", "proj_out.", "to_out.0.", "ff.net.2.")


def make_unet(damping: float, device: str = "cuda", settings: dict[str, Any] = SDXL) -> Any:
    import comfy.ldm.modules.diffusionmodules.openaimodel as openaimodel
    import comfy.ops
    import torch

    operations = comfy.ops.disable_weight_init
    unet = openaimodel.UNetModel(**settings, dtype=torch.float16, device=device, operations=operations)
    return randomized(unet, damping)


def randomized(module: Any, damping: float = 1.0) -> Any:
    """Set random weights that preserve variance; scales those of LAST_LAYERS by `damping`. Returns the module."""
    import torch

    torch.manual_seed(0)
    for name, weight in module.named_parameters():
        weight.requires_grad_(False)
        if weight.ndim > 1:
            last = any(layer in name for layer in LAST_LAYERS)
            weight.normal_(0, weight[0].numel() ** -0.5 * (damping if last else 1.0))
        else:
            weight.fill_(1.0 if name.endswith("weight") else 0.0)
    return module.eval()


def relative(a: Any, b: Any) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def measure(unet: Any, reference: Any) -> dict[str, dict[str, float]]:
    import torch
    from resolute_pack.compile_cache.keys import Role  # type: ignore[import-not-found]
    from resolute_pack.nodes.adapters.forward.compiled_forward import CompiledForward  # type: ignore[import-not-found]
    from resolute_pack.nodes.adapters.process.compile_request import CompileRequest  # type: ignore[import-not-found]

    eager = unet._forward
    compiled = {
        name: CompiledForward(unet, eager, CompileRequest.resolved(name, "cuda", Role.UNET))
        for name in ("cudagraph", "inductor")
    }
    rows: dict[str, dict[str, float]] = {}
    for width, height, batch, tokens in SIZES:
        generator = torch.Generator("cuda").manual_seed(width * height + batch)

        def noise(*shape: int, generator: Any = generator) -> Any:
            return torch.randn(*shape, device="cuda", dtype=torch.float16, generator=generator)

        inputs = (
            noise(batch, 4, height // 8, width // 8), torch.full((batch,), 500.0, device="cuda"),
            noise(batch, tokens, 2048), noise(batch, 2816), None,
        )  # fmt: skip
        eager(*inputs, {})  # the first call of a process may choose other convolution kernels than later ones
        plain = eager(*inputs, {})
        exact = reference._forward(*(x.float() if torch.is_tensor(x) else x for x in inputs), {})
        row = {"eager_to_fp32": relative(plain, exact), "eager_again": relative(eager(*inputs, {}), plain)}
        for name, forward in compiled.items():
            first, replayed = forward(*inputs, {}), forward(*inputs, {})
            row[name] = max(relative(first, plain), relative(replayed, plain))
            row[f"{name}_to_fp32"] = relative(replayed, exact)
        rows[f"{width}x{height} batch {batch} tokens {tokens}"] = row
        print(width, height, batch, tokens, {key: f"{value:.1e}" for key, value in row.items()}, flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    sys.argv = sys.argv[:1]
    load_pack()
    import copy

    import torch

    rows: dict[str, dict[str, float]] = {}
    with torch.inference_mode():
        for name, damping in (("random", 1.0), ("damped", 0.2)):
            unet = make_unet(damping)
            reference = copy.deepcopy(unet).float()
            reference.dtype = torch.float32
            rows |= {f"{name} {size}": row for size, row in measure(unet, reference).items()}
            del unet, reference
    from resolute_pack.nodes.adapters.process import runtime

    result = {
        "date": rig.now(),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "allocator": torch.cuda.get_allocator_backend(),
        "counters": runtime.cache().stats.snapshot(),
        "rows": rows,
    }
    print(result["counters"])
    rig.save(options.out, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
