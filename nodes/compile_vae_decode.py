"""Compile VAE Decode: VAE -> VAE."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from .adapters.compile.vae_decode import compile_vae_decode
from .inputs import CATEGORY, backend_input


class CompileVAEDecode(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ResoluteCompileVAEDecode",
            display_name="Compile VAE Decode",
            category=CATEGORY,
            description=(
                "Decode with compiled blocks, at any size without compiling again. Encoding, tiled decoding and the "
                "fall-back when memory runs out stay ComfyUI's own. The VAE that goes in stays as it is."
            ),
            inputs=[
                io.Vae.Input("vae", tooltip="The VAE whose decoder is compiled."),
                backend_input(),
            ],
            outputs=[io.Vae.Output(tooltip="The same VAE, decoding through the graph cache.")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(cls, vae: Any, backend: str) -> io.NodeOutput:
        return io.NodeOutput(compile_vae_decode(vae, backend, cls.hidden.unique_id))
