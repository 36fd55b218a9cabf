"""The relative error of one UNet call, by backend and size, against eager fp16 and against fp32.

A full SDXL UNet with random weights runs in this process with ComfyUI's modules (COMFYUI_PATH or `.comfyui`), through
the pack's own adapters. Two kinds of weights: `random` preserves variance in every layer, which amplifies rounding more
than a trained network does; `damped` scales the last layer of each residual branch by 0.2, because training starts
those at zero and leaves them small. Needs CUDA.
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.card_regions import load_pack
from scripts.models.architectures import SDXL

SIZES = [(1024, 1024, 2, 77), (960, 720, 2, 77), (720, 720, 2, 77), (264, 200, 1, 154), (256, 256, 2, 77)]


# The last layer of each residual branch of a UNetModel.
LAST_LAYERS = ("out_layers.3.", "proj_out.", "to_out.0.", "ff.net.2.")


def make_unet(damping: float) -> Any:
    """Give random weights that preserve variance; scales those of LAST_LAYERS by `damping`."""
    import comfy.ldm.modules.diffusionmodules.openaimodel as openaimodel
    import comfy.ops

    operations = comfy.ops.disable_weight_init
    unet = openaimodel.UNetModel(**SDXL, dtype=torch.float16, device="cuda", operations=operations)
    torch.manual_seed(0)
    for name, weight in unet.named_parameters():
        weight.requires_grad_(False)
        if weight.ndim > 1:
            last = any(layer in name for layer in LAST_LAYERS)
            weight.normal_(0, weight[0].numel() ** -0.5 * (damping if last else 1.0))
        else:
            weight.fill_(1.0 if name.endswith("weight") else 0.0)
    return unet.eval()


def relative(a: Any, b: Any) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def measure(unet: Any, reference: Any) -> dict[str, dict[str, float]]:
    from resolute_pack.compile_cache.keys import Role  # type: ignore[import-not-found]
    from resolute_pack.nodes.adapters.patch.compiled_forward import CompiledForward  # type: ignore[import-not-found]
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


def main() -> None:
    """Write the errors by weights and size into the file that the command line names."""
    out, sys.argv = Path(sys.argv[1]), sys.argv[:1]
    load_pack()
    rows: dict[str, dict[str, float]] = {}
    with torch.inference_mode():
        for name, damping in (("random", 1.0), ("damped", 0.2)):
            unet = make_unet(damping)
            reference = copy.deepcopy(unet).float()
            reference.dtype = torch.float32
            rows |= {f"{name} {size}": row for size, row in measure(unet, reference).items()}
            del unet, reference
    out.write_text(json.dumps(rows), "utf-8")


if __name__ == "__main__":
    main()
