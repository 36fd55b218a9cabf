"""Resolution: a width and height that suit the model, checked before anything else runs."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..compile_cache import sizes
from ..compile_cache.sizes import EXACT, NEAREST_READY, NEAREST_VALID
from .adapters.comfyui.messages import on_node
from .adapters.comfyui.version import search_aliases, shows_cached_text
from .adapters.report import cache_report
from .inputs import CATEGORY


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
            description="Width and height for a latent or an image. If the model cannot use this size, it takes the "
            "nearest one that works, and says so.",
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
                    "Another number becomes the nearest one.",
                ),
                io.Combo.Input(
                    "use",
                    options=[NEAREST_VALID, NEAREST_READY, EXACT],
                    default=NEAREST_VALID,
                    optional=True,
                    tooltip="nearest valid takes the nearest multiples. nearest ready takes the closest size of the "
                    "same aspect ratio that is already compiled and captured, if there is one. exact stops the prompt "
                    "if a side is no multiple.",
                ),
            ],
            outputs=[
                io.Int.Output(display_name="width", tooltip="Width in pixels."),
                io.Int.Output(display_name="height", tooltip="Height in pixels."),
            ],
            **shows_cached_text(),
        )

    @classmethod
    def fingerprint_inputs(cls, use: str = NEAREST_VALID, **inputs: Any) -> str:
        # The list of ready sizes changes while the inputs stay the same, so it is part of the fingerprint.
        return str(sorted(cache_report.ready_sizes())) if use == NEAREST_READY else ""

    @classmethod
    def execute(cls, preset: str, width: int, height: int, multiple: str, use: str = NEAREST_VALID) -> io.NodeOutput:
        """Raises ValueError if a side is not a multiple of `multiple` and `use` is EXACT."""
        size = sizes.resolve_size(preset, width, height, multiple, snaps=use != EXACT)
        asked = sizes.asked_size(preset, width, height)
        text = sizes.explain_snap(asked, size, multiple)
        if use == NEAREST_READY:
            ready = [sizes.Size(*size) for size in cache_report.ready_sizes()]
            found = sizes.nearest_ready(size, ready, multiple)
            text = sizes.explain_choice(asked, found) if found or size == asked else text
            size = found or size
        return io.NodeOutput(size.width, size.height, ui=on_node(text))


def _side(name: str) -> io.Int.Input:
    # The front end rounds typed numbers to the step. The node rounds other programs' numbers, and to larger multiples.
    return io.Int.Input(
        name,
        default=sizes.DEFAULT,
        min=sizes.MINIMUM,
        max=sizes.MAXIMUM,
        step=int(sizes.MULTIPLES[0]),
        tooltip=f"The image's {name} in pixels. Only used if preset is 'custom'.",
    )
