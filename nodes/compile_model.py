"""Compile Model: MODEL -> MODEL."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from .adapters.comfyui.version import search_aliases, with_node_id
from .adapters.patch.diffusion_model import compile_diffusion_model
from .adapters.patch.wrappers import AUTO
from .inputs import CATEGORY, backend_input, batching_input


class CompileModel(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ResoluteCompileModel",
            display_name="Compile Model",
            category=CATEGORY,
            **search_aliases(
                *("faster", "speed", "speed up", "torch compile", "cuda graph", "tensorrt", "inductor", "optimize"),
                *("accelerate", "turbo", "onediff", "加速", "更快", "高速化", "速い"),
            ),
            description=(
                "Samples with compiled blocks and CUDA graphs. Blocks compile beside the first prompts; after that you "
                "can change size, batch, text or LoRA without compiling again."
            ),
            inputs=[
                io.Model.Input(
                    "model", tooltip="The diffusion model (UNet or DiT) to compile. This input is not changed."
                ),
                backend_input(),
                batching_input(),
                io.String.Input(
                    "leave_out",
                    default="",
                    optional=True,
                    tooltip="Blocks that run uncompiled, separated by commas: kinds (ResBlock) or places "
                    "(input_blocks.4). A name that the model does not have stops the prompt with a list of those "
                    "that it has. Empty compiles all.",
                ),
            ],
            outputs=[io.Model.Output(tooltip="A compiled copy of the model, for the sampler.")],
            **with_node_id(),
        )

    @classmethod
    def execute(cls, model: Any, backend: str, batching: str = AUTO, leave_out: str = "") -> io.NodeOutput:
        return io.NodeOutput(compile_diffusion_model(model, backend, cls.hidden.unique_id, batching, leave_out))
