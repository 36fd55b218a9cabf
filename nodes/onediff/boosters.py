"""OneDiff's boosters: nodes that pass a setting to a speed-up node."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..adapters.onediff.boosters import NOT_QUANTIZED, Booster, merged
from .common import (
    DEEPCACHE_TEXT,
    NO_EFFECT,
    CustomBooster,
    DeepCacheBooster,
    QuantizationBooster,
    TorchCompileBooster,
    deepcache_from,
    deepcache_inputs,
    ignored_text,
    schema,
)


class ModelBooster(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "OneDiffModelBooster",
            "Apply Model Booster - OneDiff",
            "Compile Model and DeepCache",
            "The speed-up node that it is wired to compiles, and adds DeepCache if a DeepCache booster is wired here.",
            [
                QuantizationBooster.Input("quantization_booster", optional=True, tooltip="Nothing is quantized."),
                DeepCacheBooster.Input("deepcache_booster", optional=True, tooltip="Adds DeepCache."),
                TorchCompileBooster.Input(
                    "torchcompile_booster", optional=True, tooltip="Only its `disable` has an effect: nothing compiles."
                ),
            ],
            [CustomBooster.Output(tooltip="For the custom_booster of a speed-up node or a loader.")],
        )

    @classmethod
    def execute(
        cls,
        quantization_booster: Booster | None = None,
        deepcache_booster: Booster | None = None,
        torchcompile_booster: Booster | None = None,
    ) -> io.NodeOutput:
        return io.NodeOutput(merged(deepcache_booster, quantization_booster, torchcompile_booster))


class DeepcacheBooster(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "OneFlowDeepcacheBooster",
            "OneFlow Deepcache Booster - OneDiff",
            "DeepCache",
            DEEPCACHE_TEXT,
            deepcache_inputs(),
            [DeepCacheBooster.Output(tooltip="For Apply Model Booster.")],
        )

    @classmethod
    def execute(cls, **inputs: Any) -> io.NodeOutput:
        return io.NodeOutput(Booster(deepcache=deepcache_from(inputs)))


class NexfortBooster(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "OneDiffNexfortBooster",
            "Nexfort Booster - OneDiff",
            "Compile Model",
            "Nexfort's modes have no effect: the backend auto compiles.",
            [
                io.Boolean.Input("fullgraph", default=False, optional=True, tooltip=NO_EFFECT),
                io.Boolean.Input("dynamic", default=True, optional=True, tooltip=NO_EFFECT),
                ignored_text("mode", "max-optimize:max-autotune:low-precision"),
                ignored_text("docs_link", multiline=True),
            ],
            [TorchCompileBooster.Output(tooltip="For Apply Model Booster.")],
        )

    @classmethod
    def execute(cls, **_: Any) -> io.NodeOutput:
        return io.NodeOutput(Booster())


class TorchCompile(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "OneDiffTorchCompileBooster",
            "Torch Compile Booster - OneDiff",
            "Compile Model",
            "torch.compile's modes have no effect: the backend auto compiles. `disable` switches compiling off.",
            [
                io.Boolean.Input("fullgraph", default=False, optional=True, tooltip=NO_EFFECT),
                ignored_text("dynamic"),
                ignored_text("backend", "inductor"),
                ignored_text("mode", "default"),
                io.Boolean.Input("disable", default=False, optional=True, tooltip="Compile nothing."),
                ignored_text("docs_link", multiline=True),
            ],
            [TorchCompileBooster.Output(tooltip="For Apply Model Booster.")],
        )

    @classmethod
    def execute(cls, disable: bool = False, **_: Any) -> io.NodeOutput:
        notes = ("the Torch Compile Booster is switched off, so nothing is compiled",) if disable else ()
        return io.NodeOutput(Booster(compiles=not disable, notes=notes))


class OnlineQuantization(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        def number(name: str, default: int, highest: int) -> Any:
            return io.Int.Input(name, default=default, min=0, max=highest, optional=True, tooltip=NO_EFFECT)

        return schema(
            "OneDiffOnlineQuantizationBooster",
            "Online OneFlow Quantizer - OneDiff",
            "Compile Model without quantization",
            "Nothing is quantized: the model runs in the precision in which ComfyUI loaded it.",
            [
                number("quantized_conv_percentage", 100, 100),
                number("quantized_linear_percentage", 100, 100),
                number("conv_compute_density_threshold", 100, 2000),
                number("linear_compute_density_threshold", 300, 2000),
            ],
            [QuantizationBooster.Output(tooltip="For Apply Model Booster.")],
        )

    @classmethod
    def execute(cls, **_: Any) -> io.NodeOutput:
        return io.NodeOutput(NOT_QUANTIZED)


NODES: list[type[io.ComfyNode]] = [ModelBooster, DeepcacheBooster, NexfortBooster, TorchCompile, OnlineQuantization]
