"""The form of a deprecated node, OneDiff's types, and inputs that several of its nodes have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from comfy_api.latest import io

from ..adapters.comfyui.version import with_node_id
from ..adapters.onediff.deepcache_settings import DeepCacheInputs

CATEGORY = "Resolute/OneDiff"
NO_EFFECT = "Has no effect here; kept because saved workflows have it."
DEEPCACHE_TEXT = "start_step and end_step are DeepCache's percents times 1000; level and block give its depth."

CustomBooster = io.Custom("CUSTOM_BOOSTER")
DeepCacheBooster = io.Custom("DeepCacheBooster")
TorchCompileBooster = io.Custom("TorchCompileBooster")
QuantizationBooster = io.Custom("QuantizationBooster")


def node(
    node_id: str,
    title: str,
    became: str,
    about: str,
    inputs: Callable[[], list[Any]],
    outputs: Callable[[], list[Any]],
    run: Callable[..., io.NodeOutput],
) -> type[io.ComfyNode]:
    """A deprecated node.

    title: OneDiff's own. became: the node to use now, shown in the title; empty if none is needed any more. about: a
    sentence or two on what it does now. run: gets the number of the node, and the inputs by name. A node without
    outputs is run by ComfyUI for its own sake.
    """

    class Node(io.ComfyNode):
        @classmethod
        def define_schema(cls) -> io.Schema:
            advice = f"Use {became} in new workflows." if became else "It is no longer needed."
            given = outputs()
            return io.Schema(
                node_id=node_id,
                display_name=f"{title} → {became}" if became else f"{title} (no longer needed)",
                category=CATEGORY,
                description=f"OneDiff's node. {advice} {about}",
                inputs=inputs(),
                outputs=given,
                **with_node_id(),
                is_output_node=not given,
                is_deprecated=True,
            )

        @classmethod
        def execute(cls, **given: Any) -> io.NodeOutput:
            return run(cls.hidden.unique_id, **given)

    Node.__name__ = Node.__qualname__ = node_id
    return Node


def booster_input() -> Any:
    return CustomBooster.Input(
        "custom_booster", optional=True, tooltip="From Apply Model Booster: adds DeepCache, or switches compiling off."
    )


def inplace_input() -> Any:
    return io.Boolean.Input("inplace", default=True, optional=True, tooltip=NO_EFFECT)


def vae_speedup_input() -> Any:
    return io.Combo.Input(
        "vae_speedup",
        options=["disable", "enable"],
        default="disable",
        optional=True,
        tooltip="Compiles the VAE too.",
    )


def static_mode_input() -> Any:
    return io.Combo.Input(
        "static_mode", options=["enable", "disable"], default="enable", optional=True, tooltip=NO_EFFECT
    )


def ignored_text(name: str, default: str = "", *, multiline: bool = False) -> Any:
    return io.String.Input(name, default=default, multiline=multiline, optional=True, tooltip=NO_EFFECT)


def deepcache_inputs() -> list[Any]:
    """OneDiff's five inputs of DeepCache; `deepcache_from` reads them."""

    def number(name: str, default: int, lowest: int, highest: int, tooltip: str) -> Any:
        return io.Int.Input(name, default=default, min=lowest, max=highest, optional=True, tooltip=tooltip)

    return [
        number("cache_interval", 3, 1, 1000, "As `interval` of DeepCache: the whole UNet runs on every so many steps."),
        number("cache_layer_id", 0, 0, 12, "The UNet's level whose blocks the other steps still run, from 0."),
        number("cache_block_id", 1, 0, 12, "The block of that level. With the level it gives `depth` of DeepCache."),
        number("start_step", 0, 0, 1000, "A noise level, not a step: DeepCache's start_percent times 1000."),
        number("end_step", 1000, 0, 1000, "A noise level, not a step: DeepCache's end_percent times 1000."),
    ]


def deepcache_from(values: dict[str, Any]) -> DeepCacheInputs:
    return DeepCacheInputs(**{name: int(value) for name, value in values.items()})
