"""Free Graphs: release the memory of all captures in the middle of a workflow."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from .adapters.comfyui.messages import on_node
from .adapters.comfyui.version import search_aliases
from .adapters.patch.free_captures import free_graphs, freed_text
from .inputs import CATEGORY


class FreeGraphs(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ResoluteFree",
            display_name="Free Graphs",
            category=CATEGORY,
            **search_aliases("free memory", "vram", "unload", "cuda graph", "clear cache"),
            description=(
                "Frees the memory of all captured graphs when the workflow reaches this node; OneFlow graphs stay. The "
                "next run captures again, about 0.1 s for each size, and compiles nothing."
            ),
            inputs=[
                io.AnyType.Input(
                    "any", tooltip="Passed through unchanged. Connect it at the place where memory should be freed."
                )
            ],
            outputs=[io.AnyType.Output(display_name="any", tooltip="The input, unchanged.")],
            is_output_node=True,  # ComfyUI then runs it even if nothing is connected to its output
        )

    @classmethod
    def fingerprint_inputs(cls, **kwargs: Any) -> float:
        return float("nan")  # NaN never equals the last value, so ComfyUI never skips the node

    @classmethod
    def execute(cls, any: Any) -> io.NodeOutput:
        return io.NodeOutput(any, ui=on_node(freed_text(free_graphs())))
