"""OneDiff's speed-up nodes: a MODEL, a VAE or a CONTROL_NET in, a compiled copy out."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

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
    schema,
    static_mode_input,
)


class ModelSpeedup(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "ModelSpeedup",
            "Model Speedup",
            "Compile Model",
            "It compiles with the backend auto, and adds DeepCache if a booster asks for it.",
            [io.Model.Input("model", tooltip="The model to compile."), booster_input(), inplace_input()],
            [io.Model.Output(tooltip="A compiled copy of the model.")],
        )

    @classmethod
    def execute(cls, model: Any, custom_booster: Booster | None = None, inplace: bool = True) -> io.NodeOutput:
        return io.NodeOutput(speed_up_model(model, custom_booster, cls.hidden.unique_id))


class SVDSpeedup(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "SVDSpeedup",
            "SVD Speedup",
            "Compile Model",
            "It compiles with the backend auto. A video model needs no node of its own.",
            [
                io.Model.Input("model", tooltip="The model to compile."),
                io.Boolean.Input("inplace", default=False, optional=True, tooltip=NO_EFFECT),
                ignored_text("cache_name", "svd"),
                booster_input(),
            ],
            [io.Model.Output(tooltip="A compiled copy of the model.")],
        )

    @classmethod
    def execute(cls, model: Any, custom_booster: Booster | None = None, **_: Any) -> io.NodeOutput:
        return io.NodeOutput(speed_up_model(model, custom_booster, cls.hidden.unique_id))


class ModuleDeepCacheSpeedup(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "ModuleDeepCacheSpeedup",
            "Model DeepCache Speedup",
            "Compile Model and DeepCache",
            DEEPCACHE_TEXT,
            [io.Model.Input("model", tooltip="A UNet."), static_mode_input(), *deepcache_inputs()],
            [io.Model.Output(tooltip="A compiled copy of the model with DeepCache.")],
        )

    @classmethod
    def execute(cls, model: Any, static_mode: str = "enable", **inputs: Any) -> io.NodeOutput:
        booster = Booster(deepcache=deepcache_from(inputs))
        return io.NodeOutput(speed_up_model(model, booster, cls.hidden.unique_id))


class VaeSpeedup(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "VaeSpeedup",
            "VAE Speedup",
            "Compile VAE Decode",
            "It compiles the decoder with the backend auto.",
            [io.Vae.Input("vae", tooltip="The VAE to compile."), booster_input(), inplace_input()],
            [io.Vae.Output(tooltip="A copy of the VAE with a compiled decoder.")],
        )

    @classmethod
    def execute(cls, vae: Any, custom_booster: Booster | None = None, inplace: bool = True) -> io.NodeOutput:
        return io.NodeOutput(speed_up_vae(vae, custom_booster, cls.hidden.unique_id))


class ControlnetSpeedup(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "ControlnetSpeedup",
            "ControlNet Speedup",
            "Compile ControlNet",
            "It compiles with the backend auto.",
            [
                io.ControlNet.Input("control_net", tooltip="The ControlNet to compile."),
                inplace_input(),
                booster_input(),
            ],
            [io.ControlNet.Output(tooltip="A compiled copy of the ControlNet.")],
        )

    @classmethod
    def execute(cls, control_net: Any, inplace: bool = True, custom_booster: Booster | None = None) -> io.NodeOutput:
        return io.NodeOutput(speed_up_controlnet(control_net, custom_booster, cls.hidden.unique_id))


class ControlNetSpeedup(io.ComfyNode):
    """The same of OneDiff's first versions, whose id has a capital N."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "ControlNetSpeedup",
            "ControlNet Speedup",
            "Compile ControlNet",
            "It compiles with the backend auto; with static_mode disable the ControlNet runs as it is.",
            [
                io.ControlNet.Input("control_net", tooltip="The ControlNet to compile."),
                io.Combo.Input(
                    "static_mode",
                    options=["enable", "disable"],
                    default="enable",
                    optional=True,
                    tooltip="disable passes the ControlNet on as it is.",
                ),
            ],
            [io.ControlNet.Output(display_name="control_net", tooltip="A compiled copy of the ControlNet.")],
        )

    @classmethod
    def execute(cls, control_net: Any, static_mode: str = "enable") -> io.NodeOutput:
        if static_mode == "disable":
            explain_passthrough("static_mode is disable, so the ControlNet runs as it is", cls.hidden.unique_id)
            return io.NodeOutput(control_net)
        return io.NodeOutput(speed_up_controlnet(control_net, None, cls.hidden.unique_id))


NODES: list[type[io.ComfyNode]] = [
    ModelSpeedup,
    SVDSpeedup,
    ModuleDeepCacheSpeedup,
    VaeSpeedup,
    ControlnetSpeedup,
    ControlNetSpeedup,
]
