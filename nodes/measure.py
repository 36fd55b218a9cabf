"""Measure: collects the pictures of a *Measure against stock* prompt, in place of its save nodes."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from .adapters.report import stock_measurements
from .inputs import CATEGORY


class Measure(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ResoluteMeasure",
            display_name="Measure",
            category=CATEGORY,
            description="The panel's Measure against stock adds this node to its prompts. It writes no file.",
            inputs=[
                io.AnyType.Input("any", tooltip="The picture to compare."),
                io.String.Input("measure", default="", tooltip="The number of the measure."),
                io.Combo.Input(
                    "arm",
                    options=[stock_measurements.ON, stock_measurements.OFF],
                    default=stock_measurements.ON,
                    tooltip="With Resolute on or off.",
                ),
            ],
            outputs=[],
            is_output_node=True,
            is_deprecated=True,  # so that no search offers it
        )

    @classmethod
    def execute(cls, any: Any, measure: str, arm: str) -> io.NodeOutput:
        stock_measurements.keep_picture(measure, arm, any)
        return io.NodeOutput()
