"""OneDiff's boosters: nodes that pass a setting to a speed-up node."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ...compile_cache.texts import Text
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
    node,
)


def _merged(
    node_id: str | None,
    quantization_booster: Booster | None = None,
    deepcache_booster: Booster | None = None,
    torchcompile_booster: Booster | None = None,
) -> io.NodeOutput:
    return io.NodeOutput(merged(deepcache_booster, quantization_booster, torchcompile_booster))


def _deepcache(node_id: str | None, **inputs: Any) -> io.NodeOutput:
    return io.NodeOutput(Booster(deepcache=deepcache_from(inputs)))


def _torch_compile(node_id: str | None, disable: bool = False, **_: Any) -> io.NodeOutput:
    notes = (Text("the Torch Compile Booster is switched off, so nothing is compiled"),) if disable else ()
    return io.NodeOutput(Booster(compiles=not disable, notes=notes))


def _number(name: str, default: int, highest: int) -> Any:
    return io.Int.Input(name, default=default, min=0, max=highest, optional=True, tooltip=NO_EFFECT)


def _switch(name: str, default: bool, tooltip: str = NO_EFFECT) -> Any:
    return io.Boolean.Input(name, default=default, optional=True, tooltip=tooltip)


NODES = [
    node(
        "OneDiffModelBooster",
        "Apply Model Booster - OneDiff",
        "Compile Model and DeepCache",
        "The speed-up node that it is wired to compiles, and adds DeepCache if a DeepCache booster is wired here.",
        lambda: [
            QuantizationBooster.Input("quantization_booster", optional=True, tooltip="Nothing is quantized."),
            DeepCacheBooster.Input("deepcache_booster", optional=True, tooltip="Adds DeepCache."),
            TorchCompileBooster.Input(
                "torchcompile_booster", optional=True, tooltip="Only its `disable` has an effect: nothing compiles."
            ),
        ],
        lambda: [CustomBooster.Output(tooltip="For the custom_booster of a speed-up node or a loader.")],
        _merged,
    ),
    node(
        "OneFlowDeepcacheBooster",
        "OneFlow Deepcache Booster - OneDiff",
        "DeepCache",
        DEEPCACHE_TEXT,
        deepcache_inputs,
        lambda: [DeepCacheBooster.Output(tooltip="For Apply Model Booster.")],
        _deepcache,
    ),
    node(
        "OneDiffNexfortBooster",
        "Nexfort Booster - OneDiff",
        "Compile Model",
        "Nexfort's modes have no effect: the backend auto compiles.",
        lambda: [
            _switch("fullgraph", False),
            _switch("dynamic", True),
            ignored_text("mode", "max-optimize:max-autotune:low-precision"),
            ignored_text("docs_link", multiline=True),
        ],
        lambda: [TorchCompileBooster.Output(tooltip="For Apply Model Booster.")],
        lambda node_id, **_: io.NodeOutput(Booster()),
    ),
    node(
        "OneDiffTorchCompileBooster",
        "Torch Compile Booster - OneDiff",
        "Compile Model",
        "torch.compile's modes have no effect: the backend auto compiles. `disable` switches compiling off.",
        lambda: [
            _switch("fullgraph", False),
            ignored_text("dynamic"),
            ignored_text("backend", "inductor"),
            ignored_text("mode", "default"),
            _switch("disable", False, "Compile nothing."),
            ignored_text("docs_link", multiline=True),
        ],
        lambda: [TorchCompileBooster.Output(tooltip="For Apply Model Booster.")],
        _torch_compile,
    ),
    node(
        "OneDiffOnlineQuantizationBooster",
        "Online OneFlow Quantizer - OneDiff",
        "Compile Model without quantization",
        "Nothing is quantized: the model runs in the precision in which ComfyUI loaded it.",
        lambda: [
            _number("quantized_conv_percentage", 100, 100),
            _number("quantized_linear_percentage", 100, 100),
            _number("conv_compute_density_threshold", 100, 2000),
            _number("linear_compute_density_threshold", 300, 2000),
        ],
        lambda: [QuantizationBooster.Output(tooltip="For Apply Model Booster.")],
        lambda node_id, **_: io.NodeOutput(NOT_QUANTIZED),
    ),
]
