"""Resolution: width and height that the model can take, checked before anything runs."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..compile_cache import sizes
from .adapters.comfyui.progress import NodeProgress
from .adapters.report import cache_report
from .inputs import CATEGORY

EXACT, NEAREST_READY = "exact", "nearest ready"


class ResoluteResolution(io.ComfyNode):
    """Hands out width and height, from a preset or typed in."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs: preset, width, height (pixels), multiple. Outputs: width, height."""
        return io.Schema(
            node_id="ResoluteResolution",
            display_name="Resolution",
            category=CATEGORY,
            description="Width and height for a latent or an image. A size that the model "
            "cannot take is refused, with the nearest one that it can.",
            inputs=[
                io.Combo.Input(
                    "preset",
                    options=list(sizes.PRESETS),
                    default=sizes.CUSTOM,
                    tooltip="A common size. It replaces width and height; choose 'custom' to use those.",
                ),
                _side("width"),
                _side("height"),
                io.Combo.Input(
                    "multiple",
                    options=list(sizes.MULTIPLES),
                    default=sizes.MULTIPLES[0],
                    tooltip="Width and height must be multiples of this. 8 suits SD1.5 and SDXL, "
                    "16 suits Flux and SD3; anything else stops with the nearest valid size.",
                ),
                io.Combo.Input(
                    "use",
                    options=[EXACT, NEAREST_READY],
                    default=EXACT,
                    optional=True,
                    tooltip="nearest ready: of the sizes that are compiled and captured already, the one with this "
                    "aspect that is closest; this very size where there is none.",
                ),
            ],
            outputs=[
                io.Int.Output(display_name="width", tooltip="Width in pixels."),
                io.Int.Output(display_name="height", tooltip="Height in pixels."),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def fingerprint_inputs(cls, use: str = EXACT, **inputs: Any) -> str:
        return str(sorted(cache_report.ready_sizes())) if use == NEAREST_READY else ""  # it changes without the inputs

    @classmethod
    def execute(cls, preset: str, width: int, height: int, multiple: str, use: str = EXACT) -> io.NodeOutput:
        """Raises ValueError when the size is no multiple of ``multiple``."""
        size = sizes.resolve_size(preset, width, height, multiple)
        if use == NEAREST_READY:
            ready = [sizes.Size(8 * w, 8 * h) for w, h in cache_report.ready_sizes()]
            found = sizes.nearest_ready(size, ready, multiple)
            told = f"{found} is ready" if found else f"nothing of this aspect is ready: {size} as asked"
            NodeProgress(cls.hidden.unique_id).show(told)
            size = found or size
        return io.NodeOutput(size.width, size.height)


def _side(name: str) -> io.Int.Input:
    # The arrows step by 8, but any number can be typed: the node then says what is wrong,
    # where the front end would have rounded without a word.
    return io.Int.Input(
        name,
        default=sizes.DEFAULT,
        min=sizes.MINIMUM,
        max=sizes.MAXIMUM,
        step=1,
        tooltip=f"The image's {name} in pixels; used when preset is 'custom'.",
    )
