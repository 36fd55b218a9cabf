"""Warm Up: compile and capture ahead, with progress, so that no later prompt waits."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..compile_cache.errors import UserError
from ..compile_cache.warm_up_plan import plan, table
from .adapters.warm_up.run import Subjects, left_out, warm_up
from .inputs import CATEGORY

_SMALLEST_TILE = 64  # as for core's node


class WarmUp(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ResoluteWarmUp",
            display_name="Warm Up",
            category=CATEGORY,
            description=(
                "Compiles and captures every shape in the list before you need it: one prediction and one decode for "
                "each, the largest first. What is ready is skipped, so it can stay in the workflow."
            ),
            inputs=[
                io.String.Input(
                    "sizes",
                    default="1024x1024",
                    multiline=True,
                    tooltip="Sizes in pixels, separated by commas: 1024x1024, 720x960. "
                    "SDXL or SD1.5 stands for all of its usual sizes.",
                ),
                io.String.Input("batch_sizes", default="1", tooltip="Pictures in a batch: 1, 2, 4."),
                io.String.Input(
                    "prompt_chunks",
                    default="1",
                    tooltip="Lengths of the text, in chunks of 77 tokens: 1, 2. Not used where texts are connected.",
                ),
                io.Float.Input(
                    "cfg",
                    default=7.0,
                    min=0.0,
                    max=100.0,
                    step=0.1,
                    tooltip="As in your sampler: at 1.0 there is no negative text, which is another shape.",
                ),
                *_subjects(),
                *_tiles(),
            ],
            outputs=[
                io.Model.Output(display_name="model", tooltip="The model that came in."),
                io.Vae.Output(display_name="vae", tooltip="The VAE that came in."),
                io.ControlNet.Output(display_name="control_net", tooltip="The ControlNet that came in."),
                io.String.Output(display_name="report", tooltip="Seconds and memory of each shape, and what failed."),
            ],
            hidden=[io.Hidden.unique_id],
            is_output_node=True,
        )

    @classmethod
    def fingerprint_inputs(cls, **kwargs: Any) -> float:
        return float("nan")  # graphs may have been freed since: it looks every time, and skips what is ready

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
        overlap: int = 64,
    ) -> io.NodeOutput:
        """Raises UserError for a list that cannot be read, and where nothing that is connected can be warmed up."""
        if 0 < tile_size < _SMALLEST_TILE:
            raise UserError(
                f"tile_size {tile_size} is smaller than VAE Decode (Tiled) takes: write {_SMALLEST_TILE} or more, or 0 "
                "for whole pictures."
            )
        if (positive is None) != (negative is None):
            raise UserError("Connect both texts, positive and negative, or neither.")
        texts = None if positive is None else (positive, negative)
        items = plan(sizes, batch_sizes, prompt_chunks if texts is None else None)
        subjects = Subjects(model, vae, control_net, texts, cfg, tile_size, overlap)
        text = "\n".join([table(warm_up(subjects, items, cls.hidden.unique_id)), *left_out(subjects)])
        return io.NodeOutput(model, vae, control_net, text, ui={"text": (text,)})


def _subjects() -> list[Any]:
    return [
        io.Model.Input("model", optional=True, tooltip="From Compile Model (and DeepCache: both passes are warmed)."),
        io.Vae.Input("vae", optional=True, tooltip="From Compile VAE Decode: it decodes each size once."),
        io.ControlNet.Input(
            "control_net", optional=True, tooltip="A ControlNet that the sampler will use; from Compile ControlNet."
        ),
        io.Conditioning.Input(
            "positive", optional=True, tooltip="The sampler's own texts, where their length or areas matter."
        ),
        io.Conditioning.Input("negative", optional=True, tooltip="Together with positive."),
    ]


def _tiles() -> list[Any]:
    return [
        io.Int.Input(
            "tile_size",
            default=0,
            min=0,
            max=4096,
            step=32,
            optional=True,
            tooltip="0: decode whole pictures. Otherwise the tile size of your VAE Decode (Tiled), in pixels.",
        ),
        io.Int.Input(
            "overlap", default=64, min=0, max=4096, step=32, optional=True, tooltip="As in VAE Decode (Tiled)."
        ),
    ]
