"""Graph Cache Report: the cache's counters and stalls, as text."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..compile_cache.telemetry import report_rows
from .adapters.comfyui.messages import on_node
from .adapters.comfyui.version import search_aliases
from .adapters.report import cache_report
from .inputs import CATEGORY


class GraphCacheReport(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ResoluteReport",
            display_name="Graph Cache Report",
            category=CATEGORY,
            **search_aliases("resolute report", "benchmark", "statistics", "profile", "cuda graph", "why slow"),
            description="Shows what the cache did: compiles, captures, replays, stalls, bypasses and memory.",
            inputs=[
                io.AnyType.Input(
                    "any", optional=True, tooltip="Connect the last image or latent, so that the report runs after it."
                )
            ],
            outputs=[io.String.Output(display_name="text", tooltip="The report as a table.")],
            is_output_node=True,
        )

    @classmethod
    def fingerprint_inputs(cls, **kwargs: Any) -> float:
        return float("nan")  # the report changes while the inputs stay the same, so run it every time

    @classmethod
    def execute(cls, any: Any = None) -> io.NodeOutput:
        text = report_rows.report(cache_report.report())
        return io.NodeOutput(text, ui=on_node(text))
