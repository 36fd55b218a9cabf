"""The transformer families that are tested as regions, and facts about their blocks that recognition cannot infer."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import Any, NamedTuple

import torch

from ...trust.core_code import core_name, is_of_core


class TestedFamily(NamedTuple):
    """name: for people. networks: the models that the tests run, below `comfy.ldm`. blocks: their repeated blocks.

    shared: arguments of these blocks whose first dimension is 1 at any batch size, such as a table of positions. At
    batch 1 they look like arguments that follow the batch; for other blocks, recognition tries batch 2 to tell them.
    time: arguments that depend only on the noise level (with Flux and SD3, also on the pooled text). All blocks of a
    call get the same tensors for them, and nothing writes to these.
    optional_defaults: arguments and values that core passes to these blocks in some calls and omits in others, to equal
    effect.
    """

    name: str
    networks: tuple[str, ...]
    blocks: tuple[str, ...]
    shared: tuple[str, ...] = ()
    time: tuple[str, ...] = ()
    optional_defaults: tuple[tuple[str, Any], ...] = ()


_FLUX_BLOCKS = ("flux.layers.DoubleStreamBlock", "flux.layers.SingleStreamBlock")

FAMILIES = (
    TestedFamily(
        "Z-Image, Lumina 2",
        ("lumina.model.NextDiT",),
        ("lumina.model.JointTransformerBlock",),
        ("freqs_cis",),
        time=("adaln_input",),
    ),
    TestedFamily(
        "Wan 2.1 and 2.2",
        ("wan.model.WanModel", "wan.model.VaceWanModel"),
        ("wan.model.WanAttentionBlock", "wan.model.VaceWanAttentionBlock"),
        ("freqs",),
    ),
    TestedFamily(
        "Qwen-Image and Edit",
        ("qwen_image.model.QwenImageTransformer2DModel",),
        ("qwen_image.model.QwenImageTransformerBlock",),
        time=("temb",),
    ),
    TestedFamily("LTX", ("lightricks.model.LTXVModel",), ("lightricks.model.BasicTransformerBlock",)),
    TestedFamily(
        "LTX with sound",
        ("lightricks.av_model.LTXAVModel",),
        ("lightricks.av_model.BasicAVTransformerBlock",),
    ),
    TestedFamily("Flux 1, Kontext and Flux 2", ("flux.model.Flux",), _FLUX_BLOCKS, time=("vec",)),
    TestedFamily("Chroma", ("chroma.model.Chroma",), _FLUX_BLOCKS, time=("vec",)),
    TestedFamily("HunyuanVideo and 1.5", ("hunyuan_video.model.HunyuanVideo",), _FLUX_BLOCKS, time=("vec",)),
    TestedFamily("MiniMax H3", ("minimax.model.MiniMaxH3Model",), ("minimax.model.DiTBlock",), time=("t_emb",)),
    TestedFamily("Krea 2", ("krea2.model.SingleStreamDiT",), ("krea2.model.SingleStreamBlock",), time=("vec",)),
    TestedFamily(
        "SD3 and SD3.5",
        ("modules.diffusionmodules.mmdit.OpenAISignatureMMDITWrapper",),
        ("modules.diffusionmodules.mmdit.JointBlock",),
        time=("c",),
        optional_defaults=(("use_checkpoint", False),),  # gradient checkpointing: saves memory only with gradients
    ),
    TestedFamily("HiDream", ("hidream.model.HiDreamImageTransformer2DModel",), ("hidream.model.HiDreamImageBlock",)),
    TestedFamily(
        "Hunyuan3D 2.1",
        ("hunyuan3dv2_1.hunyuandit.HunYuanDiTPlain",),
        ("hunyuan3dv2_1.hunyuandit.HunYuanDiTBlock",),
    ),
    TestedFamily(
        "AuraFlow", ("aura.mmdit.MMDiT",), ("aura.mmdit.MMDiTBlock", "aura.mmdit.DiTBlock"), time=("global_cond",)
    ),
)
_SHARED = {f"comfy.ldm.{block}": family.shared for family in FAMILIES for block in family.blocks}
_OPTIONAL_DEFAULTS = {
    f"comfy.ldm.{block}": dict(family.optional_defaults) for family in FAMILIES for block in family.blocks
}
_TIME = {f"comfy.ldm.{block}": family.time for family in FAMILIES for block in family.blocks}

# Parts of blocks that take a tensor of tokens and pick experts by its values.
_ROUTED = frozenset(
    {"comfy.ldm.hidream.model.MOEFeedForwardSwiGLU", "comfy.ldm.hunyuan3dv2_1.hunyuandit.MoEBlock"}
)  # fmt: skip

# Argument classes that are not dataclasses: the attributes to pass to the constructor as its first arguments, and its
# further arguments. The constructor derives all other attributes from these.
_REBUILD_SPECS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "comfy.ldm.lightricks.av_model.CompressedTimestep": (("data", "patches_per_frame"), {"per_frame": True}),
}


def rebuild_spec(kind: type) -> tuple[tuple[str, ...], dict[str, Any]] | None:
    """The attributes, and further arguments, from which core's class rebuilds an object; None if that is unknown."""
    if dataclasses.is_dataclass(kind) and is_of_core(kind):
        return tuple(each.name for each in dataclasses.fields(kind)), {}
    found = _REBUILD_SPECS.get(core_name(kind))
    return found if found is not None and _takes(kind, frozenset(found[1])) else None


@functools.cache
def _takes(kind: type, arguments: frozenset[str]) -> bool:
    """The class accepts these arguments in this version of ComfyUI."""
    return arguments <= inspect.signature(kind).parameters.keys()


def is_catalogued(kind: type) -> bool:
    """The tests cover blocks of this class."""
    return core_name(kind) in _SHARED


def is_routed(kind: type) -> bool:
    """Modules of this class pick experts for each token by its values."""
    return core_name(kind) in _ROUTED


def shared_arguments(block: torch.nn.Module) -> tuple[str, ...]:
    """See `TestedFamily.shared`."""
    return _SHARED.get(core_name(type(block)), ())


def time_arguments(block: torch.nn.Module) -> tuple[str, ...]:
    """See `TestedFamily.time`."""
    return _TIME.get(core_name(type(block)), ())


def optional_defaults_of(block: torch.nn.Module) -> dict[str, Any]:
    """See `TestedFamily.optional_defaults`."""
    return _OPTIONAL_DEFAULTS.get(core_name(type(block)), {})


def variant_of(block: Any) -> tuple[str, frozenset[str]]:
    """A name for the block's settings that compile alike (`block_id`), and the names of these settings."""
    if core_name(type(block)) == "comfy.ldm.wan.model.VaceWanAttentionBlock":
        return ("first" if block.block_id == 0 else "later"), frozenset({"block_id"})
    return "", frozenset()
