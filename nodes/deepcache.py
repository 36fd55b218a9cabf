"""DeepCache: MODEL -> MODEL."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from .adapters.comfyui.version import search_aliases, with_node_id
from .adapters.deepcache.node import add_deepcache
from .adapters.deepcache.schedule import SCHEDULES, UNIFORM, Settings
from .inputs import CATEGORY, require_numbers


class DeepCache(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ResoluteDeepCache",
            display_name="DeepCache",
            category=CATEGORY,
            **search_aliases("speed", "skip steps", "step cache", "teacache", "easycache"),
            description=(
                "Runs the deep blocks of a UNet (SD1.5, SD2, SDXL, SVD) on some steps and reuses their output on the "
                "others. This is faster and changes the image slightly; it needs more than 8 steps."
            ),
            inputs=[
                io.Model.Input("model", tooltip="A UNet, before or after Compile Model, or not compiled at all."),
                io.Int.Input(
                    "interval",
                    default=3,
                    min=1,
                    max=1000,
                    tooltip="The whole UNet runs on every interval-th step. 1 runs it on every step, as without this "
                    "node.",
                ),
                io.Int.Input(
                    "depth",
                    default=2,
                    min=1,
                    max=32,
                    tooltip="The other steps run input blocks 0 to depth and as many output blocks: SD1.5 takes 1 to "
                    "11, SDXL 1 to 8. A larger depth is slower and not always closer to the original image.",
                ),
                *_optional_inputs(),
            ],
            outputs=[io.Model.Output(tooltip="A copy of the model with DeepCache.")],
            **with_node_id(),
        )

    @classmethod
    def execute(
        cls,
        model: Any,
        interval: int,
        depth: int,
        start_percent: float = 0.0,
        end_percent: float = 1.0,
        schedule: str = UNIFORM,
        power: float = 1.4,
        centre: int = 15,
    ) -> io.NodeOutput:
        require_numbers(start_percent=start_percent, end_percent=end_percent, power=power)
        settings = Settings(interval, depth, start_percent, end_percent, schedule, power, centre)
        return io.NodeOutput(add_deepcache(model, settings, cls.hidden.unique_id))


def _optional_inputs() -> list[Any]:
    percent: dict[str, Any] = {"min": 0.0, "max": 1.0, "step": 0.001, "optional": True}
    return [
        io.Float.Input(
            "start_percent",
            default=0.0,
            **percent,
            tooltip="Before this part of the sampling, every step is a full one.",
        ),
        io.Float.Input(
            "end_percent", default=1.0, **percent, tooltip="After this part of the sampling, every step is a full one."
        ),
        io.Combo.Input(
            "schedule",
            options=list(SCHEDULES),
            default=UNIFORM,
            optional=True,
            tooltip="uniform makes every interval-th step a full one. non-uniform has as many full steps, most of them "
            "near the centre.",
        ),
        io.Float.Input(
            "power",
            default=1.4,
            min=1.0,
            max=10.0,
            step=0.05,
            optional=True,
            tooltip="Only for non-uniform: how strongly the full steps gather at the centre. 1 spaces them evenly.",
        ),
        io.Int.Input(
            "centre",
            default=15,
            min=0,
            max=1000,
            optional=True,
            tooltip="Only for non-uniform: the step around which the full steps gather.",
        ),
    ]
