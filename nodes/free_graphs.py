"""Free Graphs: give back what the cache holds, in the middle of a workflow."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from .adapters.sampling.memory import free_graphs
from .inputs import CATEGORY


class FreeGraphs(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ResoluteFree",
            display_name="Free Graphs",
            category=CATEGORY,
            description=(
                "Frees every captured graph and the allocator's unused memory when the workflow reaches this node. "
                "(OneFlow gives none back.) "
                "Compiled blocks stay: the next run captures again (a tenth of a second) and compiles nothing."
            ),
            inputs=[io.AnyType.Input("any", tooltip="Passed through: put the node where memory should be freed.")],
            outputs=[io.AnyType.Output(display_name="any", tooltip="What came in, unchanged.")],
            is_output_node=True,  # it has its effect where nothing comes after it, too
        )

    @classmethod
    def fingerprint_inputs(cls, **kwargs: Any) -> float:
        return float("nan")  # never equal to the last time: ComfyUI must not skip it

    @classmethod
    def execute(cls, any: Any) -> io.NodeOutput:
        free_graphs()
        return io.NodeOutput(any)
