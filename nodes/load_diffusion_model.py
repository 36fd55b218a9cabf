"""Load Diffusion Model (Faster Format): a file -> MODEL, in the format with the GPU's fastest matmul."""

from __future__ import annotations

from typing import Any

import folder_paths
from comfy_api.latest import io

from .adapters.comfyui.messages import show_on_node
from .adapters.comfyui.version import search_aliases, with_node_id
from .adapters.formats import faster_format
from .inputs import CATEGORY


class LoadDiffusionModelFaster(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ResoluteLoadDiffusionModel",
            display_name="Load Diffusion Model (Faster Format)",
            category=CATEGORY,
            **search_aliases("faster", "speed", "int8", "fp8", "nvfp4", "quantize", "unet", "load model"),
            description=(
                "Load Diffusion Model with the weights of its blocks in int8, fp8 or NVFP4: less memory, and on most "
                "cards faster. Pictures differ a little from those of the file as it is."
            ),
            inputs=[
                io.Combo.Input(
                    "unet_name",
                    options=folder_paths.get_filename_list("diffusion_models"),
                    tooltip="A file in ComfyUI's models/diffusion_models folder, in 16 or 32 bits.",
                ),
                io.Combo.Input(
                    "format",
                    options=list(faster_format.CHOICES),
                    default=faster_format.AUTO,
                    tooltip=(
                        "auto takes what this card has products of (int8 on RTX 20 and 30, fp8 on RTX 40 and Hopper, "
                        "NVFP4 on RTX 50) where it is at least 5 percent faster here, as measured once."
                    ),
                ),
                io.Boolean.Input(
                    "keep",
                    default=False,
                    tooltip="Also write the quantized model beside the file, so that the next load needs no work.",
                ),
            ],
            outputs=[io.Model.Output(tooltip="The diffusion model. Compile Model may follow.")],
            **with_node_id(),
        )

    @classmethod
    def execute(cls, unet_name: str, format: str, keep: bool) -> io.NodeOutput:
        path = folder_paths.get_full_path_or_raise("diffusion_models", unet_name)
        model, text = faster_format.load(path, format, keep)
        node_id: Any = cls.hidden.unique_id
        show_on_node(text, node_id)
        return io.NodeOutput(model)
