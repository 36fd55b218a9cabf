"""Compile ControlNet: CONTROL_NET -> CONTROL_NET."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from .adapters.comfyui.version import search_aliases, with_node_id
from .adapters.patch.controlnet import compile_controlnet
from .inputs import CATEGORY, backend_input


class CompileControlNet(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ResoluteCompileControlNet",
            display_name="Compile ControlNet",
            category=CATEGORY,
            **search_aliases("faster", "speed", "torch compile", "cuda graph", "optimize"),
            description=(
                "Runs a ControlNet with compiled blocks and CUDA graphs. You can change strength, start and end "
                "percent and size without compiling again."
            ),
            inputs=[
                io.ControlNet.Input(
                    "control_net", tooltip="The ControlNet to compile, from its loader. This input is not changed."
                ),
                backend_input(),
            ],
            outputs=[io.ControlNet.Output(tooltip="A compiled copy of the ControlNet, for Apply ControlNet.")],
            **with_node_id(),
        )

    @classmethod
    def execute(cls, control_net: Any, backend: str) -> io.NodeOutput:
        return io.NodeOutput(compile_controlnet(control_net, backend, cls.hidden.unique_id))
