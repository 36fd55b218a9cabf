"""What a workflow will sample and decode, told from its graph alone: nothing is run, loaded or imported for it.

Sizes are in pixels, eight to a cell of the latent. That holds for every model that Resolute compiles; a model or VAE
with other cells (Flux 2) is not told from the graph, and its own empty latents are not known here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ....compile_cache.errors import UserError, first_line
from ....compile_cache.sizes import Size
from .graph import in_order, live, without_rule
from .node import Image, ImageSize, Latent, Link, Node, NotKnownError, Outputs
from .numbers import CELL
from .rules import DECODERS, RULES, SAMPLERS

_HOW_TO_EXPORT = "In ComfyUI choose File, Export (API), and use that file."
_NO_RULE = "Resolute does not know what this node does to sizes and batches"
_MOST_NAMED = 5
_LARGEST = 2**20  # pixels, cells or pictures: beyond it, a number was meant otherwise

Values = dict[str, "Outputs | NotKnownError"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """One sampler of the workflow. size: in pixels; batch: pictures at once, texts not counted.

    negative: None where the sampler has no such text. cfg: None where it is known only when the prompt runs.
    """

    node: str
    label: str
    model: Link
    positive: Link
    negative: Link | None
    cfg: float | None
    size: Size
    batch: int


@dataclass(frozen=True, slots=True)
class Decoding:
    """One VAE Decode. size: of the picture, in pixels. tile_size, overlap: in pixels, as typed in; None: not tiled."""

    node: str
    label: str
    vae: Link
    size: Size
    batch: int
    tile_size: int | None = None
    overlap: int | None = None


@dataclass(frozen=True, slots=True)
class Scan:
    """unknown: sentences that name a node, what cannot be known before it runs, and why."""

    samplings: tuple[Sampling, ...]
    decodings: tuple[Decoding, ...]
    unknown: tuple[str, ...]


def scan(
    prompt: Mapping[str, Any],
    *,
    image_size: ImageSize | None = None,
) -> Scan:
    """Follow sizes and batches through a workflow in API form to its samplers and decoders.

    Nodes that no output can need are left out, as ComfyUI leaves them out. Raises UserError for what is no workflow in
    API form.

    image_size: what LoadImage was given -> width and height as it would read them (turned by EXIF), None for what is
    not one readable, still picture.
    """
    nodes, _ = evaluated(checked(prompt), image_size)
    samplings: list[Sampling] = []
    decodings: list[Decoding] = []
    remarks: list[str] = []
    causes: dict[str, list[str]] = {}
    running = live(nodes)
    for node in running:
        try:
            if node.class_type in SAMPLERS:
                sampling, remark = _sampling(node)
                samplings.append(sampling)
                remarks += [remark] if remark else []
            elif node.class_type in DECODERS:
                decodings.append(_decoding(node))
        except NotKnownError as cause:
            causes.setdefault(str(cause), []).append(node.label)
    remarks += [
        f"{node.label}: a node of this kind ({node.class_type}) may sample or decode, and Resolute has no rule for it."
        for node in without_rule(running)
    ]
    unknown = [*(_left_out(cause, labels) for cause, labels in causes.items()), *dict.fromkeys(remarks)]
    return Scan(tuple(samplings), tuple(decodings), tuple(unknown))


def checked(prompt: Any) -> dict[str, Mapping[str, Any]]:
    """The nodes of a workflow in API form; UserError says what is wrong with anything else."""
    if isinstance(prompt, Mapping) and isinstance(prompt.get("nodes"), list):
        raise UserError(
            f"This is a workflow in the form that ComfyUI's editor saves, not in API form. {_HOW_TO_EXPORT}"
        )
    if not isinstance(prompt, Mapping) or not prompt:
        raise UserError(f"This is no workflow in API form: nodes by their ids were expected. {_HOW_TO_EXPORT}")
    for name, content in prompt.items():
        if not isinstance(content, Mapping) or not isinstance(content.get("class_type"), str):
            raise UserError(f"Entry '{name}' of the workflow is no node: it has no 'class_type'. {_HOW_TO_EXPORT}")
        if not isinstance(content.get("inputs"), Mapping):
            raise UserError(f"Node {name} ({content['class_type']}) has no 'inputs'. {_HOW_TO_EXPORT}")
    return {str(name): content for name, content in prompt.items()}


def evaluated(
    contents: Mapping[str, Mapping[str, Any]], image_size: ImageSize | None
) -> tuple[dict[str, Node], Values]:
    """Every node, and what comes out of it or why that is not known, by node id."""
    values: Values = {}
    nodes = {name: Node(name, content, values, image_size) for name, content in contents.items()}
    for node in in_order(nodes):
        values[node.id] = _outputs(node)
    for node in nodes.values():
        values.setdefault(node.id, node.unknown("it is part of a cycle, or comes after one, and ComfyUI refuses that"))
    return nodes, values


def _outputs(node: Node) -> Outputs | NotKnownError:
    rule = RULES.get(node.class_type)
    if rule is None:
        return node.unknown(_NO_RULE)
    try:
        given = rule(node)
        outputs = given if isinstance(given, tuple) else (given,)
        for value in outputs:
            if isinstance(value, (Latent, Image)):
                _check_size(node, value)
    except NotKnownError as cause:
        return cause
    except (ValueError, ArithmeticError) as error:
        return node.unknown(first_line(error))
    return outputs


def _check_size(node: Node, value: Latent | Image) -> None:
    sides = value.width, value.height, value.batch
    if min(sides) < 1:
        raise node.unknown("what comes out of it is empty")
    if max(sides) > _LARGEST:
        raise node.unknown("what comes out of it is larger than any picture")


def _sampling(node: Node) -> tuple[Sampling, str]:
    guidance = SAMPLERS[node.class_type](node)
    latent = node.latent("latent_image")
    sampling = Sampling(
        node=node.id,
        label=node.label,
        model=guidance.model,
        positive=guidance.positive,
        negative=guidance.negative,
        cfg=guidance.cfg,
        size=Size(latent.width * CELL, latent.height * CELL),
        batch=latent.batch,
    )
    return sampling, guidance.remark


def _decoding(node: Node) -> Decoding:
    latent = node.latent("samples")
    tiled = "tile_size" in node.inputs
    return Decoding(
        node=node.id,
        label=node.label,
        vae=node.link("vae"),
        size=Size(latent.width * CELL, latent.height * CELL),
        batch=latent.batch,
        tile_size=node.integer("tile_size") if tiled else None,
        overlap=node.integer("overlap", 64) if tiled else None,
    )


def _left_out(cause: str, labels: Sequence[str]) -> str:
    more = f" and {len(labels) - _MOST_NAMED} more" if len(labels) > _MOST_NAMED else ""
    return f"{cause}. Not known because of that: {', '.join(labels[:_MOST_NAMED])}{more}."
