"""DeepCache's two passes through a UNet: the whole network, recording a feature, and the shallow part, from a feature.

At depth m the shallow part is input blocks 0 to m and the last m+1 output blocks. The feature (batch, channels, height,
width) is the input of the first of these output blocks, before the skip connection is concatenated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ....compile_cache.keys import Component, Role
from ..comfyui.transformer_options import BLOCK, ORIGINAL_SHAPE, PATCHES, TRANSFORMER_INDEX
from ..patch.step_pass import StepPass

Control = Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Full(StepPass):
    """The whole network. keep: called with the feature, if a later step needs it."""

    role: ClassVar[Role] = Role.DEEPCACHE_FULL
    depth: int
    keep: Callable[[torch.Tensor], None] | None
    passes: Counter[str]

    @property
    def settings(self) -> tuple[Component, ...]:
        return (("deepcache depth", self.depth),)

    def run(
        self,
        module: torch.nn.Module,
        forward: Callable[..., Any],
        latent: torch.Tensor,
        transformer_options: Mapping[str, Any] | None = None,
        **arguments: Any,
    ) -> tuple[Any, torch.Tensor | None]:
        """(the model's result, the feature)."""

        def call(options: dict[str, Any]) -> Any:
            return forward(latent, transformer_options=options, **arguments)

        return run_full(module, self.depth, call, transformer_options or {})

    def finish(self, output: tuple[Any, torch.Tensor | None]) -> Any:
        result, feature = output
        self.passes["full"] += 1
        if self.keep is not None and feature is not None:
            self.keep(feature)
        return result


@dataclass(frozen=True, eq=False)
class Fast(StepPass):
    """The shallow part, from the feature of an earlier step."""

    role: ClassVar[Role] = Role.DEEPCACHE_FAST
    depth: int
    feature: torch.Tensor
    passes: Counter[str]

    @property
    def settings(self) -> tuple[Component, ...]:
        return (("deepcache depth", self.depth),)

    def arguments(self, module: torch.nn.Module, given: dict[str, Any]) -> dict[str, Any]:
        """Adds the feature, and drops the ControlNet residuals of blocks that do not run."""
        unet: Any = module
        control = shallow_control(given.get("control"), len(unet.output_blocks), self.depth)
        return {**given, "control": control, "feature": self.feature}

    def run(
        self,
        module: torch.nn.Module,
        forward: Callable[..., Any],
        latent: torch.Tensor,
        **arguments: Any,
    ) -> Any:
        return run_fast(module, self.depth, x=latent, **arguments)

    def finish(self, output: Any) -> Any:
        self.passes["fast"] += 1
        return output


def run_full(
    unet: Any, depth: int, call: Callable[[dict[str, Any]], Any], options: Mapping[str, Any]
) -> tuple[Any, torch.Tensor | None]:
    """Run the whole network and record the feature. Returns (the result, the feature).

    call: the model's own forward, as a function of its transformer_options. Core calls patches before each output
    block; the first of them records the feature, so the result is core's own to the last bit. If core stops calling
    such patches, the feature is None, and every step runs in full.
    """
    first = len(unet.output_blocks) - depth - 1
    patches = options.get(PATCHES) or {}
    others = patches.get("output_block_patch") or []
    recorded: list[torch.Tensor] = []

    def record(h: torch.Tensor, skip: Any, inside: Mapping[str, Any]) -> tuple[torch.Tensor, Any]:
        if inside[BLOCK] == ("output", first):
            recorded.append(h.clone() if others else h)  # FreeU writes into its input
        return h, skip

    result = call({**options, PATCHES: {**patches, "output_block_patch": [record, *others]}})
    return result, recorded[0] if recorded else None


def run_fast(
    unet: Any,
    depth: int,
    feature: torch.Tensor,
    x: torch.Tensor,
    timesteps: torch.Tensor,
    context: Any = None,
    y: torch.Tensor | None = None,
    control: Control | None = None,
    transformer_options: MutableMapping[str, Any] | None = None,
    **kwargs: Any,
) -> Any:
    """Run the shallow part of `unet` (core's UNetModel). x (batch, channels, height, width) is the latent.

    It mirrors `UNetModel._forward` and takes its arguments. control: from `shallow_control`; like core, this pops
    residuals out of its lists. Patches of other packs run for the blocks that run, and blocks keep their numbers.
    """
    core = core_unet()
    options = {} if transformer_options is None else transformer_options
    options[ORIGINAL_SHAPE] = list(x.shape)
    options[TRANSFORMER_INDEX] = 0
    patches = options.get(PATCHES) or {}
    emb = _embedding(unet, x, timesteps, y, patches, options)
    temporal = {
        "time_context": kwargs.get("time_context"),
        "num_video_frames": kwargs.get("num_video_frames", unet.default_num_video_frames),
        "image_only_indicator": kwargs.get("image_only_indicator"),
    }

    def block(layers: Any, h: torch.Tensor, output_shape: Any = None) -> Any:
        return core.forward_timestep_embed(layers, h, emb, context, options, output_shape, **temporal)

    h, skips = x, []
    for number, layers in enumerate(unet.input_blocks[: depth + 1]):
        options[BLOCK] = ("input", number)
        h = core.apply_control(block(layers, h), control, "input")
        for patch in patches.get("input_block_patch") or ():
            h = patch(h, options)
        skips.append(h)
        for patch in patches.get("input_block_patch_after_skip") or ():
            h = patch(h, options)
    first = len(unet.output_blocks) - depth - 1
    options[TRANSFORMER_INDEX] += _skipped_transformers(unet, depth)
    output_patches = patches.get("output_block_patch") or ()
    h = feature.clone() if output_patches else feature  # patches may write into it
    for number, layers in enumerate(unet.output_blocks[first:], first):
        options[BLOCK] = ("output", number)
        skip = core.apply_control(skips.pop(), control, "output")
        for patch in output_patches:
            h, skip = patch(h, skip, options)
        if skip is not None:
            h = torch.cat([h, skip], dim=1)
        # An upsampled map has the size of the skip connection that it meets next: 23 becomes 45, not 46.
        h = block(layers, h, skips[-1].shape if skips else None)
    h = h.type(x.dtype)
    return unet.id_predictor(h) if unet.predict_codebook_ids else unet.out(h)


def core_unet() -> Any:
    """Core's module `openaimodel`. Look up its functions there at each call, as core does, so that a pack that replaces
    one (AnimateDiff's `forward_timestep_embed`) replaces it for both passes.
    """
    import comfy.ldm.modules.diffusionmodules.openaimodel as openaimodel

    return openaimodel


def _embedding(
    unet: Any,
    x: torch.Tensor,
    timesteps: torch.Tensor,
    y: torch.Tensor | None,
    patches: Mapping[str, Any],
    options: Mapping[str, Any],
) -> Any:
    emb = unet.time_embed(core_unet().timestep_embedding(timesteps, unet.model_channels, repeat_only=False).to(x.dtype))
    for patch in patches.get("emb_patch") or ():
        emb = patch(emb, unet.model_channels, options)
    if unet.num_classes is None:
        return emb
    assert y is not None, "a class-conditional model needs y"
    return emb + unet.label_emb(y)


def _skipped_transformers(unet: Any, depth: int) -> int:
    """How many transformers core would have counted in the blocks that a fast pass skips."""
    skipped = [*unet.input_blocks[depth + 1 :], *unet.output_blocks[: len(unet.output_blocks) - depth - 1]]
    if unet.middle_block is not None:
        skipped.append(unet.middle_block)
    return sum(isinstance(layer, core_unet().SpatialTransformer) for layers in skipped for layer in layers)


def shallow_control(control: Control | None, blocks: int, depth: int) -> dict[str, Any] | None:
    """The ControlNet residuals that belong to the shallow part of a UNet with `blocks` output blocks.

    Core pops each block's residual off the end of its list, so the list starts with the residual of the last block to
    run. Lists are copied and shortened, never changed. One with fewer residuals than blocks stays aligned at its end.
    """
    if control is None:
        return None
    shallow: dict[str, Any] = {}
    for name, residuals in control.items():
        if name == "input":
            shallow[name] = list(residuals)[-(depth + 1) :]
        elif name == "output":
            first = blocks - depth - 1
            shallow[name] = list(residuals)[: max(len(residuals) - first, 0)]
    return shallow
