"""OneDiff's speed-up nodes: a MODEL, a VAE or a CONTROL_NET in, a compiled copy out."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ...compile_cache.texts import Text
from ..adapters.compile.backend_choice import explain_passthrough
from ..adapters.onediff.boosters import Booster, speed_up_controlnet, speed_up_model, speed_up_vae
from .common import (
    DEEPCACHE_TEXT,
    NO_EFFECT,
    booster_input,
    deepcache_from,
    deepcache_inputs,
    ignored_text,
    inplace_input,
    node,
    static_mode_input,
)


def _model(node_id: str | None, model: Any, custom_booster: Booster | None = None, **_: Any) -> io.NodeOutput:
    return io.NodeOutput(speed_up_model(model, custom_booster, node_id))


def _vae(node_id: str | None, vae: Any, custom_booster: Booster | None = None, **_: Any) -> io.NodeOutput:
    return io.NodeOutput(speed_up_vae(vae, custom_booster, node_id))


def _with_deepcache(node_id: str | None, model: Any, static_mode: str = "enable", **inputs: Any) -> io.NodeOutput:
    return io.NodeOutput(speed_up_model(model, Booster(deepcache=deepcache_from(inputs)), node_id))


def _controlnet(
    node_id: str | None,
    control_net: Any,
    static_mode: str = "enable",
    custom_booster: Booster | None = None,
    **_: Any,
) -> io.NodeOutput:
    if static_mode == "disable":
        explain_passthrough(Text("static_mode is disable, so the ControlNet runs as it is"), node_id)
        return io.NodeOutput(control_net)
    return io.NodeOutput(speed_up_controlnet(control_net, custom_booster, node_id))


def _switch() -> Any:
    tooltip = "disable passes the ControlNet on as it is."
    return io.Combo.Input(
        "static_mode", options=["enable", "disable"], default="enable", optional=True, tooltip=tooltip
    )


NODES = [
    node(
        "ModelSpeedup",
        "Model Speedup",
        "Compile Model",
        "It compiles with the backend auto, and adds DeepCache if a booster asks for it.",
        lambda: [io.Model.Input("model", tooltip="The model to compile."), booster_input(), inplace_input()],
        lambda: [io.Model.Output(tooltip="A compiled copy of the model.")],
        _model,
    ),
    node(
        "SVDSpeedup",
        "SVD Speedup",
        "Compile Model",
        "It compiles with the backend auto. A video model needs no node of its own.",
        lambda: [
            io.Model.Input("model", tooltip="The model to compile."),
            io.Boolean.Input("inplace", default=False, optional=True, tooltip=NO_EFFECT),
            ignored_text("cache_name", "svd"),
            booster_input(),
        ],
        lambda: [io.Model.Output(tooltip="A compiled copy of the model.")],
        _model,
    ),
    node(
        "ModuleDeepCacheSpeedup",
        "Model DeepCache Speedup",
        "Compile Model and DeepCache",
        DEEPCACHE_TEXT,
        lambda: [io.Model.Input("model", tooltip="A UNet."), static_mode_input(), *deepcache_inputs()],
        lambda: [io.Model.Output(tooltip="A compiled copy of the model with DeepCache.")],
        _with_deepcache,
    ),
    node(
        "VaeSpeedup",
        "VAE Speedup",
        "Compile VAE Decode",
        "It compiles the decoder with the backend auto.",
        lambda: [io.Vae.Input("vae", tooltip="The VAE to compile."), booster_input(), inplace_input()],
        lambda: [io.Vae.Output(tooltip="A copy of the VAE with a compiled decoder.")],
        _vae,
    ),
    node(
        "ControlnetSpeedup",
        "ControlNet Speedup",
        "Compile ControlNet",
        "It compiles with the backend auto.",
        lambda: [
            io.ControlNet.Input("control_net", tooltip="The ControlNet to compile."),
            inplace_input(),
            booster_input(),
        ],
        lambda: [io.ControlNet.Output(tooltip="A compiled copy of the ControlNet.")],
        _controlnet,
    ),
    node(  # of OneDiff's first versions, whose id has a capital N
        "ControlNetSpeedup",
        "ControlNet Speedup",
        "Compile ControlNet",
        "It compiles with the backend auto; with static_mode disable the ControlNet runs as it is.",
        lambda: [io.ControlNet.Input("control_net", tooltip="The ControlNet to compile."), _switch()],
        lambda: [io.ControlNet.Output(display_name="control_net", tooltip="A compiled copy of the ControlNet.")],
        _controlnet,
    ),
]
