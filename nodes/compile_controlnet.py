"""Compile ControlNet: CONTROL_NET -> CONTROL_NET."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from .adapters.compile.controlnet import compile_controlnet
from .inputs import CATEGORY, backend_input


class CompileControlNet(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ResoluteCompileControlNet",
            display_name="Compile ControlNet",
            category=CATEGORY,
            description=(
                "Run a ControlNet with compiled blocks and CUDA graphs. Strength, start and end percent, and the size "
                "change without compiling again. The ControlNet that goes in stays as it is."
            ),
            inputs=[
                io.ControlNet.Input("control_net", tooltip="The ControlNet to compile, from its loader."),
                backend_input(),
            ],
            outputs=[io.ControlNet.Output(tooltip="The same ControlNet, run through the graph cache.")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(cls, control_net: Any, backend: str) -> io.NodeOutput:
        return io.NodeOutput(compile_controlnet(control_net, backend, cls.hidden.unique_id))
