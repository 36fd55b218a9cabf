"""The rows of `benchmarks.smoke`: the prompts of each, its number of forwards, and its expected seconds."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from . import rig, workloads
from .family_models import family
from .rig import STEPS, node

SDXL, FLUX, FP8 = "SDXL", "Flux", "Flux fp8"
QUEUE, COLD, RESTART, SIZE, LORA = "queue", "cold", "restart", "size", "lora"
DECODE, START, UNLOAD = "decode", "start", "unload"
BEHIND = (QUEUE, COLD)  # with an empty store: code compiles in the background
FORMS = {FLUX: "", FP8: "fp8-scaled"}
DECODES = 8  # in the longest prompt of the row of decodes

Size = tuple[int, int, int]  # width, height, batch


@dataclass(frozen=True)
class Row:
    """kind: decides the checks. counts: steps (or decodes) of each prompt. decodes: further decodes in each prompt.
    new: calls of the diffusion model before its first replay. most: the largest number of captures.
    seconds: of Resolute and of stock on a slow host; a row that does not fit into `--seconds` is left out. sizes: of
    each prompt, if they differ.
    """

    name: str
    kind: str
    model: str
    size: Size
    counts: tuple[int, ...]
    decodes: int
    new: int
    most: int
    seconds: tuple[int, int]
    sizes: tuple[Size, ...] = ()

    def at(self, number: int) -> Row:
        """The row of one prompt, with its size."""
        return replace(self, size=self.sizes[number]) if self.sizes else self

    def about(self) -> dict[str, Any]:
        """The row's entry in the result file before it is measured."""
        found = asdict(self) | {"row": self.name}
        return {
            key: found[key] for key in ("row", "kind", "model", "size", "sizes", "counts", "decodes", "new", "most")
        }


def rows(is_small: bool) -> list[Row]:
    """The rows in the order of a run. The rows of BEHIND are measured in their own server, with an empty store.

    The seconds of a slow host (stock: 136 to 220 ms for a step of SDXL), without waits for compiles:

        server   start and pause  SDXL  Flux  fp8  unload  sum
        cold                  18    40     6    6           70
        restart               18    30    10   10       5   73
        stock                 18    85    10   10       5  128
    """
    steps, flux_steps = (3, 3) if is_small else (STEPS, 10)
    sizes: tuple[Size, ...] = ((1024, 1024, 1), (960, 720, 1), (1280, 1280, 1), (1024, 1024, 2))
    if is_small:
        sizes = ((128, 128, 1), (96, 128, 1), (160, 96, 1), (128, 128, 2))
    first, other = ((*size, 1) for size in family("flux", is_small).sizes[:2])
    queue = (*sizes[:1] * 5, *sizes[1:2] * 2, sizes[0])
    found = [
        Row("SDXL, nothing on disk", QUEUE, SDXL, sizes[0], (steps,) * len(queue), 1, 1, 2, (40, 45), queue),
        *(Row(f"{model}, nothing on disk", COLD, model, first, (1,), 0, 1, 1, (6, 0)) for model in FORMS),
        Row(f"SDXL {_text(sizes[0])}, restart", RESTART, SDXL, sizes[0], (steps, 1, steps), 1, 1, 2, (12, 5)),
        *(Row(f"SDXL {_text(size)}", SIZE, SDXL, size, (1, 1, steps), 1, 1, 2, (4, 8)) for size in sizes[1:]),
        Row(f"SDXL {_text(sizes[0])}, LoRA", LORA, SDXL, sizes[0], (1, 1, steps), 1, 0, 0, (3, 8)),
        Row(f"SDXL {_text(sizes[0])}, decode", DECODE, SDXL, sizes[0], (1, 1, DECODES), 0, 10, 1, (3, 3)),
    ]
    for model in FORMS:
        found.append(Row(f"{model} {_text(first)}", START, model, first, (1, 1, flux_steps), 0, 1, 1, (8, 8)))
        found.append(Row(f"{model} {_text(other)}", SIZE, model, other, (1, 1), 0, 1, 1, (2, 2)))
    return [*found, Row("Unload", UNLOAD, "", (0, 0, 0), (), 0, 0, 0, (5, 5))]


def _text(size: Size) -> str:
    return f"{size[0]}x{size[1]}" + (f", batch {size[2]}" if size[2] > 1 else "")


def prompt(row: Row, contender: str, count: int, seed: int, files: dict[str, str], is_small: bool) -> dict[str, Any]:
    """One prompt of a row. files: the file names of "checkpoint" and "lora"."""
    size = (*row.size, "a lighthouse")
    if row.model in FORMS:
        made = workloads.transformer("flux", family("flux", is_small), size, count, seed, FORMS[row.model])
    elif row.kind == DECODE:
        made = _decodes(files["checkpoint"], row.size, count, seed)
    else:
        made = rig.prompt(files["checkpoint"], size, count, seed)
    if row.kind == LORA:
        made = rig.with_lora(made, files["lora"])
    return workloads.as_contender(made, contender)


def _decodes(checkpoint: str, size: Size, count: int, seed: int) -> dict[str, Any]:
    """A prompt of `count` decodes. The latents differ, so that ComfyUI's cache has none of them. The pictures are
    downscaled before they are saved: PNG would take longer than the decode.
    """
    width, height, batch = size
    nodes: dict[str, Any] = {
        "load": node("CheckpointLoaderSimple", ckpt_name=checkpoint),
        "latent": node("EmptyLatentImage", width=width, height=height, batch_size=batch),
    }
    small = {"upscale_method": "nearest-exact", "width": 64, "height": 64, "crop": "disabled"}
    for n in range(count):
        nodes[f"latent{n}"] = node("LatentMultiply", samples=["latent", 0], multiplier=1 + seed / 10 + n / 1000)
        nodes[f"decode{n}"] = node("VAEDecode", samples=[f"latent{n}", 0], vae=["load", 2])
        nodes[f"small{n}"] = node("ImageScale", image=[f"decode{n}", 0], **small)
        nodes[f"show{n}"] = node("PreviewImage", images=[f"small{n}", 0])
    return nodes
