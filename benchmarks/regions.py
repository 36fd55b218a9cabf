"""Measures the time to compile and to run single regions, one after the other in this process, without a disk cache.

    python -m benchmarks.regions --out FILE [--torchs-group-norm]

Regions of SDXL's UNet (batch 2) and of its VAE decoder, random weights, fp16, through the pack's own adapters and
ComfyUI's modules (COMFYUI_PATH or `.comfyui`). Calls are timed at the sizes of a 1024x1024 image and of another one,
captured on CUDA. On the CPU, maps have an eighth of the height and width, and the run only shows that the script works.
`--torchs-group-norm` uses torch's own decomposition of GroupNorm.
"""

from __future__ import annotations

import argparse
import datetime
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from . import rig
from .parity import SDXL, load_pack_for_device, make_unet, randomized

# One transformer block instead of SDXL's two or ten; transformer blocks are not measured.
UNET = {
    **SDXL, "transformer_depth": [0, 0, 1, 1, 1, 1], "transformer_depth_middle": 1,
    "transformer_depth_output": [0, 0, 0, 1, 1, 1, 1, 1, 1],
}  # fmt: skip
DECODER = {
    "ch": 128, "out_ch": 3, "ch_mult": (1, 2, 4, 4), "num_res_blocks": 2, "attn_resolutions": [], "in_channels": 3,
    "resolution": 256, "z_channels": 4,
}  # fmt: skip
UNET_REGIONS = {
    "input_blocks.1.0 ResBlock": (320, 128),
    "output_blocks.8.0 ResBlock": (640, 128),
    "output_blocks.5.0 ResBlock": (960, 64),
    "output_blocks.0.0 ResBlock": (2560, 32),
    "input_blocks.4.1 SpatialTransformer.enter": (640, 64),
}
DECODER_REGIONS = {"up.0.block.1 ResnetBlock": (128, 1024), "up.1.block.0 ResnetBlock": (512, 512)}
OTHER = (45 / 64, 15 / 16)  # the other size, as fractions of height and width
ROUNDS, CALLS = 5, 20


def cases(device: str) -> Iterator[tuple[str, Any, list[Any], list[Any]]]:
    """(name, site, inputs at 1024x1024, inputs at another size) of each region."""
    import torch
    from resolute_pack.compile_cache.backends.inductor.compile.tracing import region_format  # type: ignore[import-not-found]
    from resolute_pack.nodes.adapters.blocks import decoder  # type: ignore[import-not-found]
    from resolute_pack.nodes.adapters.blocks.unets import unet  # type: ignore[import-not-found]

    side = 1 if device == "cuda" else 8

    def noise(batch: int, channels: int, height: float, width: float) -> Any:
        given = torch.randn(batch, channels, int(height) // side, int(width) // side, device=device).half()
        return given.contiguous(memory_format=region_format(given))

    embedding = torch.randn(2, 1280, device=device).half()
    for module, family, regions, batch in (
        (make_unet(1.0, device, UNET), unet, UNET_REGIONS, 2),
        (make_decoder(device), decoder, DECODER_REGIONS, 1),
    ):
        hooks = family.hooks(module, lambda *_: None, lambda _: None)
        sites = {f"{site.name} {site.kind}": site for hook in hooks for site in hook.sites}
        for name, (channels, size) in regions.items():
            rest = [embedding] if name.endswith("ResBlock") else []
            other = noise(batch, channels, size * OTHER[0], size * OTHER[1])
            yield name, sites[name], [noise(batch, channels, size, size), *rest], [other, *rest]


def make_decoder(device: str) -> Any:
    import comfy.ldm.modules.diffusionmodules.model as model

    return randomized(model.Decoder(**DECODER).to(device).half())


def measure(site: Any, inputs: list[Any], other: list[Any]) -> dict[str, float]:
    from resolute_pack.compile_cache.backends.inductor.compile import lowering, tracing
    from resolute_pack.compile_cache.regions.region_weights import weight_inputs, weight_slots
    from torch._inductor import config
    from torch._inductor.utils import fresh_cache

    device = inputs[0].device
    sizes = tracing.bind_dims(site.dims, [tensor.shape for tensor in inputs])
    weights = weight_inputs(weight_slots(site.module, site.without))
    with fresh_cache(), config.patch(fx_graph_cache=False, compile_threads=1):
        started = time.perf_counter()
        hints = tracing.general_hints(sizes, device)
        traced = tracing.trace(site.function, site.module, inputs, site.dims, hints, True, site.without)
        middle = time.perf_counter()
        compiled = lowering.compile_trace(traced, keep=True)
        ended = time.perf_counter()
        used = [weights[index] for index in traced.used_weights]
        (result, *_), right = compiled.code([*used, *inputs]), site.function(site.module, *inputs)
        return {
            "trace_seconds": middle - started,
            "lower_seconds": ended - middle,
            "kernels": len(compiled.kernels),
            "difference": float((result.double() - right.double()).norm() / right.double().norm()),
            "microseconds": microseconds(lambda: compiled.code([*used, *inputs]), device),
            "microseconds_at_other_size": microseconds(lambda: compiled.code([*used, *other]), device),
        }


def microseconds(call: Callable[[], Any], device: Any) -> float:
    """Time of one call: the minimum over ROUNDS of the mean over CALLS."""
    import torch

    call()
    if device.type == "cuda":
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        call = graph.replay
    rounds = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        for _ in range(CALLS):
            call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        rounds.append((time.perf_counter() - started) / CALLS * 1e6)
    return min(rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--torchs-group-norm", action="store_true", help="use torch's own decomposition, to compare")
    options = parser.parse_args()
    device = load_pack_for_device()
    import torch

    if options.torchs_group_norm:
        from resolute_pack.compile_cache.backends.inductor.compile import lowering
        from torch._inductor.decomposition import select_decomp_table

        lowering.decompositions = select_decomp_table
    rows = []
    with torch.inference_mode():
        for name, *case in cases(device):
            row = measure(*case)
            rows.append({"region": name, **row})
            print(f"{name:44}" + "  ".join(f"{key} {value:.3g}" for key, value in row.items()), flush=True)
    result = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "torch": torch.__version__,
        "group_norm": "torch's" if options.torchs_group_norm else "channels first",
        "rows": rows,
    }
    rig.save(options.out, result)


if __name__ == "__main__":
    main()
