"""Each of OneDiff's nodes does one of these here. A function gets the number of the node and its inputs by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from comfy_api.latest import io

import nodes

from ...compile_cache.errors import UserError, excerpt
from ...compile_cache.texts import Text
from ..adapters.compile.backend_choice import explain_passthrough
from ..adapters.compile.controlnet import compile_controlnet
from ..adapters.compile.vae import compile_vae_decode
from ..adapters.onediff.boosters import NO_BOOSTER, NOT_QUANTIZED, Booster, merged, speed_up_model
from ..adapters.onediff.deepcache_settings import DeepCacheInputs

_OFF = Text("the Torch Compile Booster is switched off, so nothing is compiled")


def _cached(inputs: dict[str, int]) -> Booster:
    return Booster(DeepCacheInputs(**{name: int(value) for name, value in inputs.items()}))


# --- speed-up nodes --------------------------------------------------------------------------------------------------


def model(node_id: str | None, model: Any, custom_booster: Booster | None = None, **_: Any) -> io.NodeOutput:
    return io.NodeOutput(speed_up_model(model, custom_booster or NO_BOOSTER, node_id))


def cached_model(node_id: str | None, model: Any, static_mode: str = "", **inputs: int) -> io.NodeOutput:
    return io.NodeOutput(speed_up_model(model, _cached(inputs), node_id))


def vae(node_id: str | None, vae: Any, custom_booster: Booster | None = None, **_: Any) -> io.NodeOutput:
    return io.NodeOutput(compile_vae_decode(vae, (custom_booster or NO_BOOSTER).backend, node_id))


def control_net(
    node_id: str | None, control_net: Any, static_mode: str = "", custom_booster: Booster | None = None, **_: Any
) -> io.NodeOutput:
    if static_mode == "disable":
        explain_passthrough(Text("static_mode is disable, so the ControlNet runs as it is"), node_id)
        return io.NodeOutput(control_net)
    return io.NodeOutput(compile_controlnet(control_net, (custom_booster or NO_BOOSTER).backend, node_id))


# --- loaders: core's, and the compile nodes behind it ----------------------------------------------------------------


def checkpoint(
    node_id: str | None,
    ckpt_name: str,
    vae_speedup: str = "disable",
    custom_booster: Booster | None = None,
    loader: type[Any] = nodes.CheckpointLoaderSimple,
) -> io.NodeOutput:
    booster = custom_booster or NO_BOOSTER
    model, encoder, vae = loader().load_checkpoint(ckpt_name)
    model = speed_up_model(model, booster, node_id)
    if vae_speedup == "enable" and vae is not None:
        vae = compile_vae_decode(vae, booster.backend, node_id)
    return io.NodeOutput(model, encoder, vae)


def cached_checkpoint(
    node_id: str | None, ckpt_name: str, vae_speedup: str = "disable", static_mode: str = "", **inputs: int
) -> io.NodeOutput:
    return checkpoint(node_id, ckpt_name, vae_speedup, _cached(inputs))


def quantized_checkpoint(
    node_id: str | None, model_path: str = "", compile: str = "enable", **given: Any
) -> io.NodeOutput:
    return checkpoint(node_id, custom_booster=replace(NOT_QUANTIZED, compiles=compile == "enable"), **given)


def quantized_video_checkpoint(node_id: str | None, **given: Any) -> io.NodeOutput:
    return quantized_checkpoint(node_id, loader=nodes.NODE_CLASS_MAPPINGS["ImageOnlyCheckpointLoader"], **given)


def loaded_control_net(
    node_id: str | None, control_net_name: str, custom_booster: Booster | None = None
) -> io.NodeOutput:
    (loaded,) = nodes.ControlNetLoader().load_controlnet(control_net_name)
    return control_net(node_id, loaded, custom_booster=custom_booster)


def int8_model(node_id: str | None, model_path: str = "") -> io.NodeOutput:
    """Raises UserError always."""
    raise UserError(
        f"UNET Loader Int8 cannot load '{excerpt(model_path)}': only OneDiff reads its int8 files. Load the "
        "original model with Load Diffusion Model or Load Checkpoint, and put Compile Model behind it."
    )


# --- boosters, which pass a setting to a speed-up node ---------------------------------------------------------------


def model_booster(node_id: str | None, **boosters: Booster | None) -> io.NodeOutput:
    return io.NodeOutput(merged(booster for booster in boosters.values() if booster is not None))


def deepcache_booster(node_id: str | None, **inputs: int) -> io.NodeOutput:
    return io.NodeOutput(_cached(inputs))


def compile_booster(node_id: str | None, disable: bool = False, **_: Any) -> io.NodeOutput:
    return io.NodeOutput(Booster(compiles=False, notes=(_OFF,)) if disable else NO_BOOSTER)


def quantization_booster(node_id: str | None, **_: Any) -> io.NodeOutput:
    return io.NodeOutput(NOT_QUANTIZED)


# --- nodes that have nothing to do any more --------------------------------------------------------------------------


def passing_on(reason: str, *names: str) -> Callable[..., io.NodeOutput]:
    """The inputs `names` are the outputs, and the node says why."""

    def run(node_id: str | None, **given: Any) -> io.NodeOutput:
        explain_passthrough(reason, node_id)
        return io.NodeOutput(*(given[name] for name in names))

    return run
