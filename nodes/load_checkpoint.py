"""Load Checkpoint (Compiled): a checkpoint file -> MODEL, CLIP, VAE."""

from __future__ import annotations

from typing import Any

import folder_paths
from comfy_api.latest import io

from nodes import CheckpointLoaderSimple

from .adapters.comfyui.version import search_aliases, with_node_id
from .adapters.patch.diffusion_model import compile_diffusion_model
from .adapters.patch.vae import compile_vae_decode
from .inputs import CATEGORY, backend_input


class LoadCheckpointCompiled(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ResoluteLoadCheckpoint",
            display_name="Load Checkpoint (Compiled)",
            category=CATEGORY,
            **search_aliases("faster", "speed", "torch compile", "checkpoint", "load model"),
            description="Load Checkpoint, Compile Model and Compile VAE Decode in one node.",
            inputs=[
                io.Combo.Input(
                    "ckpt_name",
                    options=folder_paths.get_filename_list("checkpoints"),
                    tooltip="A file in ComfyUI's models/checkpoints folder.",
                ),
                backend_input(),
                io.Boolean.Input(
                    "compile_vae",
                    default=True,
                    tooltip="Also compile the VAE's decoder. Switch this off to decode with ComfyUI's own code.",
                ),
            ],
            outputs=[
                io.Model.Output(tooltip="The diffusion model, compiled."),
                io.Clip.Output(tooltip="The text encoder, not compiled."),
                io.Vae.Output(tooltip="The VAE; its decoder is compiled if compile_vae is on."),
            ],
            **with_node_id(),
        )

    @classmethod
    def execute(cls, ckpt_name: str, backend: str, compile_vae: bool) -> io.NodeOutput:
        model, clip, vae = CheckpointLoaderSimple().load_checkpoint(ckpt_name)
        node_id: Any = cls.hidden.unique_id
        model = compile_diffusion_model(model, backend, node_id)
        if compile_vae and vae is not None:
            vae = compile_vae_decode(vae, backend, node_id)
        return io.NodeOutput(model, clip, vae)
