"""Resolution: a width and height that suit the model, checked before anything else runs."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..compile_cache import sizes
from .adapters.comfyui.messages import on_node
from .adapters.comfyui.version import search_aliases, shows_cached_text
from .adapters.report import cache_report
from .inputs import CATEGORY

EXACT, NEAREST_READY = "exact", "nearest ready"


class ResoluteResolution(io.ComfyNode):
    """Outputs a width and a height, from a preset or as typed in."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs: preset, width, height (pixels), multiple. Outputs: width, height."""
        return io.Schema(
            node_id="ResoluteResolution",
            display_name="Resolution",
            category=CATEGORY,
            **search_aliases("aspect ratio", "size", "width", "height", "dimensions", "preset"),
            description="Width and height for a latent or an image. The prompt stops if the model cannot use this "
            "size, and the error names the nearest size that works.",
            inputs=[
                io.Combo.Input(
                    "preset",
                    options=list(sizes.PRESETS),
                    default=sizes.CUSTOM,
                    tooltip="A common size, used in place of width and height. Choose 'custom' to use width and "
                    "height.",
                ),
                _side("width"),
                _side("height"),
                io.Combo.Input(
                    "multiple",
                    options=list(sizes.MULTIPLES),
                    default=sizes.MULTIPLES[0],
                    tooltip="Width and height must be multiples of this: 8 for SD1.5 and SDXL, 16 for Flux and SD3. "
                    "Any other size stops the prompt, and the error names the nearest valid one.",
                ),
                io.Combo.Input(
                    "use",
                    options=[EXACT, NEAREST_READY],
                    default=EXACT,
                    optional=True,
                    tooltip="nearest ready takes the closest size of the same aspect ratio that is already compiled "
                    "and captured. If there is none, it takes the exact size.",
                ),
            ],
            outputs=[
                io.Int.Output(display_name="width", tooltip="Width in pixels."),
                io.Int.Output(display_name="height", tooltip="Height in pixels."),
            ],
            **shows_cached_text(),
        )

    @classmethod
    def fingerprint_inputs(cls, use: str = EXACT, **inputs: Any) -> str:
        # The list of ready sizes changes while the inputs stay the same, so it is part of the fingerprint.
        return str(sorted(cache_report.ready_sizes())) if use == NEAREST_READY else ""

    @classmethod
    def execute(cls, preset: str, width: int, height: int, multiple: str, use: str = EXACT) -> io.NodeOutput:
        """Raises ValueError if a side is not a multiple of `multiple`."""
        size = sizes.resolve_size(preset, width, height, multiple)
        text = str(size)
        if use == NEAREST_READY:
            ready = [sizes.Size(*size) for size in cache_report.ready_sizes()]
            found = sizes.nearest_ready(size, ready, multiple)
            text = sizes.explain_choice(size, found)
            size = found or size
        return io.NodeOutput(size.width, size.height, ui=on_node(text))


def _side(name: str) -> io.Int.Input:
    # step=1: with a larger step the front end silently rounds a typed number. This way the node sees it and can
    # report an invalid size.
    return io.Int.Input(
        name,
        default=sizes.DEFAULT,
        min=sizes.MINIMUM,
        max=sizes.MAXIMUM,
        step=1,
        tooltip=f"The image's {name} in pixels. Only used if preset is 'custom'.",
    )
