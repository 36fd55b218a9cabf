"""Compile VAE and Compile VAE Decode: VAE -> VAE."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from .adapters.comfyui.version import search_aliases, with_node_id
from .adapters.patch.vae import compile_vae, compile_vae_decode
from .inputs import CATEGORY, backend_input


class CompileVAE(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ResoluteCompileVAE",
            display_name="Compile VAE (Encode, Decode)",  # longer than Compile Model, which comes first
            category=CATEGORY,
            **search_aliases("faster", "speed", "torch compile", "cuda graph", "encoder", "decoder", "img2img", "edit"),
            description=(
                "Encodes and decodes with compiled blocks, at any size without compiling again. Tiling and the "
                "fallback to tiles when memory runs out stay ComfyUI's own."
            ),
            inputs=[
                io.Vae.Input("vae", tooltip="The VAE to compile. This input is not changed."),
                backend_input(),
            ],
            outputs=[io.Vae.Output(tooltip="A copy of the VAE, compiled both ways, for VAE Encode and VAE Decode.")],
            **with_node_id(),
        )

    @classmethod
    def execute(cls, vae: Any, backend: str) -> io.NodeOutput:
        return io.NodeOutput(compile_vae(vae, backend, cls.hidden.unique_id))


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
