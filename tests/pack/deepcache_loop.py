"""DeepCache written for clarity: a plain loop over the blocks of ComfyUI's UNetModel, and a plain way to drive it."""

from __future__ import annotations

from typing import Any

import torch

from .node import Node, whole


def full(unet: Any, x: Any, timesteps: Any, context: Any, y: Any = None, control: Any = None, **more: Any) -> Any:
    """Every block. Returns the output, and what entered each output block before its skip connection was joined."""
    emb = embed(unet, x, timesteps, y)
    skips, entered, h = [], [], x
    for number, block in enumerate(unet.input_blocks):
        h = run(block, h, emb, context, ("input", number), more)
        h = h + residual(control, "input", number)
        skips.append(h)
    h = run(unet.middle_block, h, emb, context, ("middle", 0), more)
    h = h + residual(control, "middle", 0)
    for number, block in enumerate(unet.output_blocks):
        entered.append(h)
        skip = skips[-1 - number] + residual(control, "output", number)
        size = skips[-2 - number].shape[2:] if number + 1 < len(skips) else None
        h = run(block, torch.cat([h, skip], dim=1), emb, context, ("output", number), more, size)
    return unet.out(h), entered


def fast(
    unet: Any,
    depth: int,
    kept: Any,
    x: Any,
    timesteps: Any,
    context: Any,
    y: Any = None,
    control: Any = None,
    **more: Any,
) -> Any:
    """Input blocks 0 to `depth`, then the last `depth` + 1 output blocks, from what was kept."""
    emb = embed(unet, x, timesteps, y)
    skips, h = [], x
    for number in range(depth + 1):
        h = run(unet.input_blocks[number], h, emb, context, ("input", number), more)
        h = h + residual(control, "input", number)
        skips.append(h)
    h = kept
    for number in range(len(unet.output_blocks) - depth - 1, len(unet.output_blocks)):
        mirror = len(unet.output_blocks) - 1 - number  # the input block whose output is this one's skip connection
        skip = skips[mirror] + residual(control, "output", number)
        size = skips[mirror - 1].shape[2:] if mirror > 0 else None
        h = run(unet.output_blocks[number], torch.cat([h, skip], dim=1), emb, context, ("output", number), more, size)
    return unet.out(h)


def embed(unet: Any, x: Any, timesteps: Any, y: Any) -> Any:
    half = unet.model_channels // 2
    frequencies = torch.exp(-torch.log(torch.tensor(10000.0)) * torch.arange(half).float() / half).to(x.device)
    angles = timesteps[:, None].float() * frequencies
    emb = unet.time_embed(torch.cat([angles.cos(), angles.sin()], dim=-1).to(x.dtype))
    return emb if y is None else emb + unet.label_emb(y)


def run(
    block: Any, h: Any, emb: Any, context: Any, where: tuple[str, int], more: dict[str, Any], size: Any = None
) -> Any:
    """`size`: height and width that an upsampling layer has to reach. `more`: frames, and transformer_options."""
    options = {**more.get("transformer_options", {}), "block": where}
    frames, only_images = more.get("num_video_frames"), more.get("image_only_indicator")
    for layer in block:
        kind = type(layer).__name__
        if kind == "ResBlock":
            h = layer(h, emb)
        elif kind == "VideoResBlock":
            h = layer(h, emb, frames, only_images)
        elif kind == "SpatialTransformer":
            h = layer(h, context, options)
        elif kind == "SpatialVideoTransformer":
            h = layer(h, context, more.get("time_context"), frames, only_images, options)
        elif kind == "Upsample":
            h = layer.conv(torch.nn.functional.interpolate(h, size=tuple(size), mode="nearest"))
        else:
            h = layer(h)
    return h


def residual(control: Any, kind: str, number: int) -> Any:
    """Lists hold the residual of block 0 last; a shorter list has none for the blocks that are left."""
    residuals = list(reversed((control or {}).get(kind) or []))
    found = residuals[number] if number < len(residuals) else None
    return 0.0 if found is None else found


class Driver:
    """Stands for `_forward`: full on the given steps of the sampler's sigmas, fast on the others where it can be."""

    def __init__(self, unet: Any, depth: int, full_steps: list[int]) -> None:
        self.unet, self.depth, self.full_steps = unet, depth, full_steps
        self.sigmas: Any = None
        self.kept: dict[Any, Any] = {}
        self.calls = {"full": 0, "fast": 0}

    def __call__(
        self,
        x: Any,
        timesteps: Any = None,
        context: Any = None,
        y: Any = None,
        control: Any = None,
        transformer_options: Any = None,
        **more: Any,
    ) -> Any:
        options = transformer_options
        if options["sample_sigmas"] is not self.sigmas:  # another run
            self.sigmas, self.kept = options["sample_sigmas"], {}
        now = float(options["sigmas"][0])
        step = max(number for number, sigma in enumerate(self.sigmas) if number == 0 or float(sigma) >= now * 0.9999)
        source = max(number for number in self.full_steps if number <= step)
        # One entry for each condition of the batch, side and shape; and calls with a patched block have their own.
        patched = str(sorted(options.get("patches_replace", {})))
        conditions = list(zip(options["uuids"], options["cond_or_uncond"], strict=True))
        keys = [(condition, tuple(x.shape[1:]), patched) for condition in conditions]
        arguments = (x, timesteps, context, y, control)
        more = {**more, "transformer_options": options}
        if step != source and all((source, key) in self.kept for key in keys):
            self.calls["fast"] += 1
            kept = torch.cat([self.kept[source, key] for key in keys])
            return fast(self.unet, self.depth, kept, *arguments, **more)
        self.calls["full"] += 1
        out, entered = full(self.unet, *arguments, **more)
        for key, part in zip(keys, entered[-(self.depth + 1)].chunk(len(keys)), strict=True):
            self.kept[source, key] = part
        return out


class ResoluteTestDeepCacheReference(Node):
    """Every `interval`-th step of each run in full, the others from what the last full one kept."""

    FUNCTION = "patch"
    INPUTS = {"model": ("MODEL",), "interval": whole(3, 1, 100), "depth": whole(3, 1, 100)}

    def patch(self, model: Any, interval: int, depth: int) -> tuple[Any]:
        clone = model.clone()
        driver = Driver(clone.get_model_object("diffusion_model"), depth, list(range(0, 1000, interval)))
        clone.add_object_patch("diffusion_model._forward", driver)
        return (clone,)
