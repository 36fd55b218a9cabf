"""Warm Up: compile and capture a list of sizes now, with progress, so that later prompts do not wait."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..compile_cache.errors import UserError
from ..compile_cache.texts import Text
from ..compile_cache.warm_up_plan import CFG, MAX_CFG, MIN_TILE, OVERLAP, plan, table
from .adapters.comfyui import switch
from .adapters.comfyui.messages import on_node
from .adapters.comfyui.version import search_aliases, with_node_id
from .adapters.warm_up.run import WarmUpInputs, skipped_inputs, warm_up
from .inputs import CATEGORY, require_numbers


class WarmUp(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ResoluteWarmUp",
            display_name="Warm Up",
            category=CATEGORY,
            **search_aliases("precompile", "preload", "cuda graph", "torch compile"),
            description=(
                "Compiles and captures every size in the list before you need it, largest first. Sizes that are ready "
                "are skipped, so the node can stay in the workflow."
            ),
            inputs=[
                io.String.Input(
                    "sizes",
                    default="1024x1024",
                    multiline=True,
                    tooltip="Sizes in pixels, separated by commas: 1024x1024, 720x960. Write SDXL or SD1.5 for all "
                    "usual sizes of that family.",
                ),
                io.String.Input("batch_sizes", default="1", tooltip="Images in a batch: 1, 2, 4."),
                io.String.Input(
                    "prompt_chunks",
                    default="1",
                    tooltip="Prompt lengths in chunks of 77 tokens: 1, 2. Ignored if positive and negative are "
                    "connected.",
                ),
                io.Float.Input(
                    "cfg",
                    default=CFG,
                    min=0.0,
                    max=MAX_CFG,
                    step=0.1,
                    tooltip="Use your sampler's cfg. At 1.0 the sampler skips the negative conditioning, which is "
                    "another shape.",
                ),
                *_OPTIONAL_INPUTS,
            ],
            outputs=[
                io.Model.Output(display_name="model", tooltip="The input model, unchanged."),
                io.Vae.Output(display_name="vae", tooltip="The input VAE, unchanged."),
                io.ControlNet.Output(display_name="control_net", tooltip="The input ControlNet, unchanged."),
                io.String.Output(display_name="report", tooltip="Seconds and memory of each size, and what failed."),
            ],
            **with_node_id(),
            is_output_node=True,
        )

    @classmethod
    def fingerprint_inputs(cls, **kwargs: Any) -> float:
        return float("nan")  # captures may have been freed since the last run, so check every time

    @classmethod
    def execute(
        cls,
        sizes: str,
        batch_sizes: str,
        prompt_chunks: str,
        cfg: float,
        model: Any = None,
        vae: Any = None,
        control_net: Any = None,
        positive: Any = None,
        negative: Any = None,
        tile_size: int = 0,
        overlap: int = OVERLAP,
    ) -> io.NodeOutput:
        """Raises UserError if an input cannot be read, or if none of the connected inputs can be warmed up."""
        if switch.is_off(cls.hidden.unique_id):  # then no input is compiled
            return io.NodeOutput(model, vae, control_net, switch.IS_OFF, ui=on_node(switch.IS_OFF))
        require_numbers(cfg=cfg)
        if 0 < tile_size < MIN_TILE:
            raise UserError(
                f"tile_size {tile_size} is smaller than VAE Decode (Tiled) allows: use {MIN_TILE} or more, or 0 to "
                "decode whole images."
            )
        if (positive is None) != (negative is None):
            raise UserError("Connect positive and negative, or neither.")
        conditioning = None if positive is None else (positive, negative)
        items = plan(sizes, batch_sizes, prompt_chunks if conditioning is None else None)
        connected = WarmUpInputs(model, vae, control_net, conditioning, cfg, tile_size, overlap)
        outcomes = warm_up(connected, items, cls.hidden.unique_id)
        text = Text.joined("\n", [table(outcomes), *skipped_inputs(connected)])
        return io.NodeOutput(model, vae, control_net, text, ui=on_node(text))


_OPTIONAL_INPUTS = [
    io.Model.Input(
        "model",
        optional=True,
        tooltip="A model from Compile Model. Each size runs one step; with DeepCache, one full and one fast step.",
    ),
    io.Vae.Input(
        "vae",
        optional=True,
        tooltip="A VAE from Compile VAE Decode or Compile VAE. It decodes each size once; from Compile VAE it also "
        "encodes it.",
    ),
    io.ControlNet.Input(
        "control_net", optional=True, tooltip="The ControlNet that your sampler uses, from Compile ControlNet."
    ),
    io.Conditioning.Input(
        "positive",
        optional=True,
        tooltip="Your sampler's positive conditioning. Connect it if it has areas, a ControlNet or an unusual length.",
    ),
    io.Conditioning.Input("negative", optional=True, tooltip="Your sampler's negative conditioning."),
    io.Int.Input(
        "tile_size",
        default=0,
        min=0,
        max=4096,
        step=32,
        optional=True,
        tooltip="The tile size of your VAE Decode (Tiled), in pixels. 0 decodes whole images.",
    ),
    io.Int.Input(
        "overlap",
        default=OVERLAP,
        min=0,
        max=4096,
        step=32,
        optional=True,
        tooltip="The overlap of your VAE Decode (Tiled), in pixels.",
    ),
]
