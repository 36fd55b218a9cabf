"""DeepCache: MODEL -> MODEL."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from .adapters.deepcache.node import add_deepcache
from .adapters.deepcache.schedule import SCHEDULES, UNIFORM, Settings
from .inputs import CATEGORY


class DeepCache(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ResoluteDeepCache",
            display_name="DeepCache",
            category=CATEGORY,
            description=(
                "Run the deep blocks of a UNet on some steps only, and reuse what they gave on the others. Faster, and "
                "a slightly different picture. For SD1.5, SD2, SDXL and SVD, with more than 8 steps; before or after "
                "Compile Model, or without it."
            ),
            inputs=[
                io.Model.Input("model", tooltip="A diffusion model that is a UNet."),
                io.Int.Input(
                    "interval",
                    default=3,
                    min=1,
                    max=10,
                    tooltip="Every how many steps the whole UNet runs. 1: always, which is as without this node.",
                ),
                io.Int.Input(
                    "depth",
                    default=2,
                    min=1,
                    max=32,
                    tooltip="How much runs on the other steps: input blocks 0 to depth, and as many output blocks. "
                    "More is slower, and not always closer to the original. SD1.5 has 1 to 11, SDXL 1 to 8.",
                ),
                *_optional_inputs(),
            ],
            outputs=[io.Model.Output(tooltip="The same model, with DeepCache.")],
            hidden=[io.Hidden.unique_id],
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
        settings = Settings(interval, depth, start_percent, end_percent, schedule, power, centre)
        return io.NodeOutput(add_deepcache(model, settings, cls.hidden.unique_id))


def _optional_inputs() -> list[Any]:
    percent: dict[str, Any] = {"min": 0.0, "max": 1.0, "step": 0.001, "optional": True}
    return [
        io.Float.Input(
            "start_percent", default=0.0, **percent, tooltip="Before this part of the sampling every step runs in full."
        ),
        io.Float.Input(
            "end_percent", default=1.0, **percent, tooltip="After this part of the sampling every step runs in full."
        ),
        io.Combo.Input(
            "schedule",
            options=list(SCHEDULES),
            default=UNIFORM,
            optional=True,
            tooltip="uniform: every interval-th step runs in full. non-uniform: as many of them, denser at the centre.",
        ),
        io.Float.Input(
            "power",
            default=1.4,
            min=1.0,
            max=10.0,
            step=0.05,
            optional=True,
            tooltip="For non-uniform: how much denser the full steps are at the centre. 1 is uniform.",
        ),
        io.Int.Input(
            "centre",
            default=15,
            min=0,
            max=1000,
            optional=True,
            tooltip="For non-uniform: the step at which full steps are densest.",
        ),
    ]
