"""Create a deprecated node from a row of the table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import folder_paths
from comfy_api.latest import io

from ..adapters.comfyui.version import with_node_id

CATEGORY = "Resolute/OneDiff"
CustomBooster = io.Custom("CUSTOM_BOOSTER")
DeepCacheBooster = io.Custom("DeepCacheBooster")
TorchCompileBooster = io.Custom("TorchCompileBooster")
QuantizationBooster = io.Custom("QuantizationBooster")

_NO_EFFECT = "Has no effect here; kept because saved workflows have it."
_OLD_LIMIT = "Of OneDiff's first versions, as in torch.allclose. Empty: ssim_threshold is the limit."
_TOOLTIPS = {
    "model": "The model to compile. A node that is no longer needed passes it on.",
    "vae": "The VAE to compile. A node that is no longer needed passes it on.",
    "control_net": "The ControlNet to compile. A node that is no longer needed passes it on.",
    "ckpt_name": "A file in ComfyUI's models/checkpoints folder.",
    "control_net_name": "A file in ComfyUI's models/controlnet folder.",
    "vae_speedup": "enable compiles the VAE's decoder too.",
    "compile": "disable passes the model on as it was loaded.",
    "disable": "Compile nothing.",
    "static_mode": "disable passes a ControlNet on without compiling it. It has no effect on other models.",
    "custom_booster": "From Apply Model Booster: adds DeepCache, or switches compiling off.",
    "deepcache_booster": "Adds DeepCache.",
    "quantization_booster": "Nothing is quantized.",
    "torchcompile_booster": "Only its `disable` has an effect: nothing compiles.",
    "cache_interval": "As `interval` of DeepCache: the whole UNet runs on every so many steps.",
    "cache_layer_id": "The UNet's level whose blocks the other steps still run, from 0.",
    "cache_block_id": "The block of that level. With the level it gives `depth` of DeepCache.",
    "start_step": "A noise level, not a step: DeepCache's start_percent times 1000.",
    "end_step": "A noise level, not a step: DeepCache's end_percent times 1000.",
    "images1": "An image or a batch.",
    "images2": "The images to compare with: the same number and size.",
    "ssim_threshold": "The lowest SSIM that is allowed, 0 to 1.",
    "raise_if_diff": "enable stops the prompt below the limit.",
    "rtol": _OLD_LIMIT,
    "atol": _OLD_LIMIT,
}
_OUTPUT_TOOLTIPS = {
    "MODEL": "A compiled copy of the model. A node that is no longer needed gives its input.",
    "VAE": "The VAE; the description says when its decoder is compiled.",
    "CONTROL_NET": "A compiled copy of the ControlNet. A node that is no longer needed gives its input.",
    "CLIP": "The text encoder, not compiled.",
    "CLIP_VISION": "The image encoder, not compiled.",
    "LATENT": "The input latent.",
    "CUSTOM_BOOSTER": "For the custom_booster of a speed-up node or a loader.",
}
_RANGES = {
    "cache_interval": (1, 1000),
    "cache_layer_id": (0, 12),
    "cache_block_id": (0, 12),
    "start_step": (0, 1000),
    "end_step": (0, 1000),
    "quantized_conv_percentage": (0, 100),
    "quantized_linear_percentage": (0, 100),
    "conv_compute_density_threshold": (0, 2000),
    "linear_compute_density_threshold": (0, 2000),
}
_BOOSTERS = (CustomBooster, DeepCacheBooster, TorchCompileBooster, QuantizationBooster)


@dataclass(frozen=True, slots=True)
class Folder:
    """A widget with the files of one of ComfyUI's model folders."""

    name: str


@dataclass(frozen=True, eq=False)
class OldNode:
    """One of OneDiff's nodes.

    title: OneDiff's own. replacement: its replacement, shown in the title; empty if none is needed. description: a
    sentence about its present effect. inputs: by name, in OneDiff's order: a type for a link, a `Folder`, a tuple of
    choices whose first one is the default, or the default of another widget. outputs: types by name; a node without
    outputs is an output node. run: called with the node's id and the inputs by name.
    """

    node_id: str
    title: str
    replacement: str
    description: str
    inputs: Mapping[str, Any]
    outputs: Mapping[str, Any]
    run: Callable[..., io.NodeOutput]

    @property
    def widgets(self) -> dict[str, Any]:
        """The widgets' defaults by name, in the order in which a workflow stores values. A `Folder` has no default."""
        named = {name: given for name, given in self.inputs.items() if not isinstance(given, type)}
        return {name: given[0] if isinstance(given, tuple) else given for name, given in named.items()}


def node_of(old: OldNode) -> type[io.ComfyNode]:
    """The deprecated node. Each widget except file names is optional, since OneDiff's versions had other widgets."""

    class Node(io.ComfyNode):
        @classmethod
        def define_schema(cls) -> io.Schema:
            advice = f"Use {old.replacement} in new workflows." if old.replacement else "It is no longer needed."
            return io.Schema(
                node_id=old.node_id,
                display_name=f"{old.title} → {old.replacement}"
                if old.replacement
                else f"{old.title} (no longer needed)",
                category=CATEGORY,
                description=f"OneDiff's node. {advice} {old.description}",
                inputs=[_input(name, given) for name, given in old.inputs.items()],
                outputs=[_output(name, kind) for name, kind in old.outputs.items()],
                **with_node_id(),
                is_output_node=not old.outputs,
                is_deprecated=True,
            )

        @classmethod
        def execute(cls, **given: Any) -> io.NodeOutput:
            return old.run(cls.hidden.unique_id, **{**old.widgets, **given})

    Node.__name__ = Node.__qualname__ = old.node_id
    return Node


def _input(name: str, given: Any) -> Any:
    tooltip = _TOOLTIPS.get(name, _NO_EFFECT)
    if isinstance(given, Folder):
        return io.Combo.Input(name, options=folder_paths.get_filename_list(given.name), tooltip=tooltip)
    if isinstance(given, tuple):
        return io.Combo.Input(name, options=list(given), default=given[0], optional=True, tooltip=tooltip)
    if isinstance(given, bool):
        return io.Boolean.Input(name, default=given, optional=True, tooltip=tooltip)
    if isinstance(given, int):
        lowest, highest = _RANGES[name]
        return io.Int.Input(name, default=given, min=lowest, max=highest, optional=True, tooltip=tooltip)
    if isinstance(given, str):
        is_long = name == "docs_link"
        return io.String.Input(name, default=given, multiline=is_long, optional=True, tooltip=tooltip)
    return given.Input(name, optional=given in _BOOSTERS or name == "latent_image", tooltip=tooltip)


def _output(name: str, kind: Any) -> Any:
    return kind.Output(display_name=name, tooltip=_OUTPUT_TOOLTIPS.get(kind.io_type, "For Apply Model Booster."))
