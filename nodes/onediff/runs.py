"""The functions that OneDiff's nodes run here. Each is called with the node's id and its inputs by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from comfy_api.latest import io

import nodes

from ...compile_cache.errors import UserError, excerpt
from ...compile_cache.texts import Text
from ..adapters.onediff.boosters import Booster, merged, speed_up_model
from ..adapters.onediff.deepcache_settings import DEFAULTS
from ..adapters.patch.backend_choice import explain_passthrough
from ..adapters.patch.controlnet import compile_controlnet
from ..adapters.patch.vae import compile_vae_decode

_OFF = Text("the Torch Compile Booster is switched off, so nothing is compiled")


def _booster(inputs: Mapping[str, Any]) -> Booster:
    """Merge the settings in a node's own inputs and the boosters among them."""
    parts = [each for each in inputs.values() if isinstance(each, Booster)]
    if DEFAULTS.keys() <= inputs.keys():
        parts.append(Booster({name: int(inputs[name]) for name in DEFAULTS}))
    if inputs.get("disable"):
        parts.append(Booster(compiles=False, notes=(_OFF,)))
    if inputs.get("compile") == "disable":
        parts.append(Booster(compiles=False))
    return merged(parts)


def booster(node_id: str | None, **inputs: Any) -> io.NodeOutput:
    """Run a booster node: pass its settings to a speed-up node or to another booster."""
    return io.NodeOutput(_booster(inputs))


# --- speed-up nodes --------------------------------------------------------------------------------------------------


def model(node_id: str | None, model: Any, **inputs: Any) -> io.NodeOutput:
    return io.NodeOutput(speed_up_model(model, _booster(inputs), node_id))


def vae(node_id: str | None, vae: Any, **inputs: Any) -> io.NodeOutput:
    return io.NodeOutput(compile_vae_decode(vae, _booster(inputs).backend, node_id))


def control_net(node_id: str | None, control_net: Any, static_mode: str = "", **inputs: Any) -> io.NodeOutput:
    if static_mode == "disable":
        explain_passthrough(Text("static_mode is disable, so the ControlNet runs eagerly"), node_id)
        return io.NodeOutput(control_net)
    return io.NodeOutput(compile_controlnet(control_net, _booster(inputs).backend, node_id))


# --- loaders: core's, and the compile nodes behind it ----------------------------------------------------------------


def checkpoint(
    node_id: str | None, ckpt_name: str, vae_speedup: str, loader: str = "CheckpointLoaderSimple", **inputs: Any
) -> io.NodeOutput:
    """loader: core's node, by its id."""
    model, encoder, vae = nodes.NODE_CLASS_MAPPINGS[loader]().load_checkpoint(ckpt_name)
    model = speed_up_model(model, _booster(inputs), node_id)
    if vae_speedup == "enable" and vae is not None:
        vae = compile_vae_decode(vae, _booster(inputs).backend, node_id)
    return io.NodeOutput(model, encoder, vae)


def loaded_control_net(node_id: str | None, control_net_name: str, **inputs: Any) -> io.NodeOutput:
    (loaded,) = nodes.ControlNetLoader().load_controlnet(control_net_name)
    return control_net(node_id, loaded, **inputs)


def int8_model(node_id: str | None, model_path: str) -> io.NodeOutput:
    """Always raises UserError."""
    raise UserError(
        f"UNET Loader Int8 cannot load '{excerpt(model_path)}': only OneDiff reads its int8 files. Load the "
        "original model with Load Diffusion Model (Faster Format) in int8, and put Compile Model behind it."
    )


# --- nodes that have nothing to do any more --------------------------------------------------------------------------


def pass_on(node_id: str | None, reason: str, passes: str, **inputs: Any) -> io.NodeOutput:
    """Returns the input named `passes`, or nothing if that is empty, and shows the reason on the node."""
    explain_passthrough(reason, node_id)
    return io.NodeOutput(*([inputs[passes]] if passes else []))
