"""UNetModel of Stable Video Diffusion: blocks that mix each frame's features with those of its neighbours in time.

Core passes b videos of t frames as b * t pictures, and t as a number. A region gets both sizes as dimensions.
"""

from __future__ import annotations

from typing import Any

import torch

from .....compile_cache.errors import BypassCode, BypassReason
from .....compile_cache.modules.site import Bypass, Hook, RegionRunner, RegionSite
from ...comfyui.transformer_options import ACTIVATIONS_SHAPE, BLOCK_INDEX
from ..common import original
from ..splice import FixedResult, StopHere, StoppedAt, replaced_parts

_FEATURES = ("b", "t", "h", "w", None)  # in this order, because features are channels-last on CUDA
_TOKENS = ("b", "t", "n", None)
_OVER_TIME = ("b", "n", "t", None)
_CONTEXT = ("b", "t", "m", None)
_EMBEDDING = ("b", "t", None)

# Code that is traced for one frame serves no other frame count.
_NO_VIDEO = BypassReason(
    BypassCode.OBSERVED_INPUT,
    "its blocks over time run eagerly: the video has one frame, or they get inputs that Resolute does not know",
)


def residual(name: str, block: torch.nn.Module, run: RegionRunner, bypass: Bypass) -> Hook:
    site = RegionSite(name, "VideoResBlock", block, _residual, (_FEATURES, _EMBEDDING), attends=False)

    def forward(x: torch.Tensor, emb: torch.Tensor, num_video_frames: Any, image_only_indicator: Any = None) -> Any:
        if x.ndim != 4 or emb.ndim != 2 or image_only_indicator is not None or not _are_videos(x, num_video_frames):
            bypass(_NO_VIDEO)
            return original(block, x, emb, num_video_frames, image_only_indicator)
        return run(site, _by_frames(x, num_video_frames), _split(emb, num_video_frames))

    return Hook(block, forward, (site,))


def _residual(block: torch.nn.Module, x: torch.Tensor, emb: torch.Tensor) -> Any:
    return original(block, _as_pictures(x), emb.flatten(0, 1), x.shape[1])


def spatial_transformer(name: str, block: Any, run: RegionRunner, bypass: Bypass) -> Hook:
    """Three regions around the spatial and the temporal transformer block, which are separate regions.

    The three run core's own forward, see `splice`.
    """
    inner = ("transformer_blocks", "time_stack")
    kind = "SpatialVideoTransformer"
    before = RegionSite(name, f"{kind}.enter", block, _before, (_FEATURES, _CONTEXT), inner)
    between = RegionSite(name, f"{kind}.turn", block, _between, (_FEATURES, _CONTEXT, _TOKENS), inner)
    after = RegionSite(name, f"{kind}.exit", block, _after, (_FEATURES, _CONTEXT, _TOKENS, _OVER_TIME), inner)

    def forward(
        x: torch.Tensor,
        context: Any = None,
        time_context: Any = None,
        timesteps: Any = None,
        image_only_indicator: Any = None,
        transformer_options: dict[str, Any] | None = None,
    ) -> Any:
        options = {} if transformer_options is None else transformer_options
        plain = time_context is None and image_only_indicator is None and type(context) is torch.Tensor
        is_known = plain and context.ndim == 3 and context.shape[0] == x.shape[0] and _are_videos(x, timesteps)
        if not is_known or not block.use_spatial_context or len(block.transformer_blocks) != 1:
            bypass(_NO_VIDEO)
            return original(block, x, context, time_context, timesteps, image_only_indicator, options)
        options[ACTIVATIONS_SHAPE] = list(x.shape)
        options[BLOCK_INDEX] = 0
        given = (_by_frames(x, timesteps), _split(context, timesteps))
        tokens = run(before, *given)
        tokens = block.transformer_blocks[0](tokens, context=context, transformer_options=options)
        own = _split(tokens, timesteps)
        over_time, time_context = run(between, *given, own)
        over_time = block.time_stack[0](over_time, context=time_context, transformer_options=options)
        return run(after, *given, own, _split(over_time, tokens.shape[1]))

    return Hook(block, forward, (before, between, after))


def _before(block: Any, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
    return _reached(block, x, context, StopHere(), StopHere()).x


def _between(block: Any, x: torch.Tensor, context: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, Any]:
    reached = _reached(block, x, context, FixedResult(tokens.flatten(0, 1)), StopHere())
    return reached.x, reached.context


def _after(block: Any, x: torch.Tensor, context: torch.Tensor, tokens: torch.Tensor, over_time: torch.Tensor) -> Any:
    return _with_blocks(block, x, context, FixedResult(tokens.flatten(0, 1)), FixedResult(over_time.flatten(0, 1)))


def _reached(block: Any, x: torch.Tensor, context: torch.Tensor, *others: torch.nn.Module) -> StoppedAt:
    try:
        _with_blocks(block, x, context, *others)
    except StoppedAt as reached:
        return reached
    raise AssertionError("core's SpatialVideoTransformer did not call its blocks")


def _with_blocks(block: Any, x: torch.Tensor, context: torch.Tensor, *others: torch.nn.Module) -> Any:
    """others: the replacements of the spatial and of the temporal transformer block."""
    lists = [torch.nn.ModuleList([other]) for other in others]
    with replaced_parts(block, dict(zip(("transformer_blocks", "time_stack"), lists, strict=True))):
        return original(block, _as_pictures(x), context.flatten(0, 1), None, x.shape[1], None, {})


def _are_videos(x: torch.Tensor, frames: Any) -> bool:
    return type(frames) is int and frames > 1 and x.shape[0] % frames == 0


def _split(x: torch.Tensor, count: int) -> torch.Tensor:
    return x.view(-1, count, *x.shape[1:])


def _by_frames(x: torch.Tensor, frames: int) -> torch.Tensor:
    """(b * t, c, h, w) as (b, t, h, w, c), a view."""
    return _split(x, frames).permute(0, 1, 3, 4, 2)


def _as_pictures(x: torch.Tensor) -> torch.Tensor:
    """(b, t, h, w, c) as (b * t, c, h, w), a view."""
    return x.flatten(0, 1).permute(0, 3, 1, 2)
