"""Compile VAE Decode: VAE -> VAE."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from .adapters.comfyui.version import search_aliases, with_node_id
from .adapters.compile.vae_decode import compile_vae_decode
from .inputs import CATEGORY, backend_input


class CompileVAEDecode(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ResoluteCompileVAEDecode",
            display_name="Compile VAE Decode",
            category=CATEGORY,
            **search_aliases("faster", "speed", "torch compile", "cuda graph", "decoder", "optimize"),
            description=(
                "Decodes with compiled blocks, at any size without compiling again. Encoding, tiling and the fallback "
                "to tiles when memory runs out stay ComfyUI's own."
            ),
            inputs=[
                io.Vae.Input("vae", tooltip="The VAE whose decoder to compile. This input is not changed."),
                backend_input(),
            ],
            outputs=[io.Vae.Output(tooltip="A copy of the VAE with a compiled decoder, for VAE Decode.")],
            **with_node_id(),
        )

    @classmethod
    def execute(cls, vae: Any, backend: str) -> io.NodeOutput:
        return io.NodeOutput(compile_vae_decode(vae, backend, cls.hidden.unique_id))
