"""`scan`: the entry point of the scanner. It runs nothing, loads nothing and does not import ComfyUI.

All sizes in `Sampling` and `Decoding` are pixels. A workflow does not say which model a file holds, so the node that
makes a latent tells how many pixels its cells have (`latent_cells`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ....compile_cache.errors import UserError, excerpt, first_line
from ....compile_cache.sizes import Size
from .graph import nodes_that_run, possible_model_runners, topological_order
from .node import Image, ImageSize, Latent, Link, Node, NotKnownError, Outputs
from .rules import DECODERS, RULES, SAMPLERS

_HOW_TO_EXPORT = "In ComfyUI choose File, Export (API), and use that file."
_NO_RULE = "Resolute does not know what this node does to sizes and batches"
_MAX_NAMED = 5  # nodes in one sentence
_MAX_SIDE = 2**20  # pixels a side, or images in a batch; a larger number is a mistake in the workflow

Values = dict[str, "Outputs | NotKnownError"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """One sampler of the workflow. size: in pixels. batch: images, not multiplied by positive and negative.

    negative: None if the sampler has none. cfg: None if it is known only when the prompt runs.
    """

    node: str
    label: str
    model: Link
    positive: Link
    negative: Link | None
    cfg: float | None
    size: Size
    batch: int
    is_video: bool = False


@dataclass(frozen=True, slots=True)
class Decoding:
    """One VAE Decode. size: of the image, in pixels. tile_size, overlap: in pixels; None for the untiled node."""

    node: str
    label: str
    vae: Link
    size: Size
    batch: int
    tile_size: int | None = None
    overlap: int | None = None
    is_video: bool = False


@dataclass(frozen=True, slots=True)
class Scan:
    """The model runs of a workflow. unknown: a sentence for each that is not known, with the node and the reason."""

    samplings: tuple[Sampling, ...]
    decodings: tuple[Decoding, ...]
    unknown: tuple[str, ...]


def scan(
    prompt: Mapping[str, Any],
    *,
    image_size: ImageSize | None = None,
) -> Scan:
    """Find the size and batch of every sampler and decoder in a workflow in API form.

    Nodes that no output needs are left out, because ComfyUI does not run them. Raises UserError if `prompt` is not a
    workflow in API form.

    image_size: the file name in LoadImage -> the width and height that LoadImage will output, None if not known. None
    in place of the function: no image file can be read.
    """
    nodes, _ = evaluate(parse_workflow(prompt), image_size)
    samplings: list[Sampling] = []
    decodings: list[Decoding] = []
    warnings: list[str] = []
    causes: dict[str, list[str]] = {}  # reason -> labels of the samplers and decoders that are not known because of it
    running = nodes_that_run(nodes)
    for node in running:
        try:
            if node.class_type in SAMPLERS:
                sampling, warning = _sampling(node)
                samplings.append(sampling)
                warnings += [warning] if warning else []
            elif node.class_type in DECODERS:
                decodings.append(_decoding(node))
        except NotKnownError as cause:
            causes.setdefault(str(cause), []).append(node.label)
    warnings += [
        f"{node.label}: this node ({excerpt(node.class_type)}) may sample or decode, and Resolute has no rule for it."
        for node in possible_model_runners(running)
    ]
    unknown = [*(_explain(cause, labels) for cause, labels in causes.items()), *dict.fromkeys(warnings)]
    return Scan(tuple(samplings), tuple(decodings), tuple(unknown))


def parse_workflow(prompt: Any) -> dict[str, Mapping[str, Any]]:
    """The nodes of a workflow in API form, by id. Raises UserError, which says how to export it, for anything else."""
    if isinstance(prompt, Mapping) and isinstance(prompt.get("nodes"), list):
        raise UserError(f"This workflow is in the form of ComfyUI's editor, not in API form. {_HOW_TO_EXPORT}")
    if not isinstance(prompt, Mapping) or not prompt:
        raise UserError(f"This is not a workflow in API form. {_HOW_TO_EXPORT}")
    for name, content in prompt.items():
        if not isinstance(content, Mapping) or not isinstance(content.get("class_type"), str):
            entry = f"Entry '{excerpt(name)}' of the workflow"
            raise UserError(f"{entry} is not a node: it has no 'class_type'. {_HOW_TO_EXPORT}")
        if not isinstance(content.get("inputs"), Mapping):
            raise UserError(
                f"Node {excerpt(name)} ({excerpt(content['class_type'])}) has no 'inputs'. {_HOW_TO_EXPORT}"
            )
    return {str(name): content for name, content in prompt.items()}


def evaluate(contents: Mapping[str, Mapping[str, Any]], image_size: ImageSize | None) -> tuple[dict[str, Node], Values]:
    """Call the rule of every node. Returns by id: the nodes, and their outputs or the reason why they are not known."""
    values: Values = {}
    nodes = {name: Node(name, content, values, image_size) for name, content in contents.items()}
    for node in topological_order(nodes):
        values[node.id] = _outputs(node)
    for node in nodes.values():
        values.setdefault(node.id, node.unknown("it is in a cycle or depends on one, so ComfyUI will refuse it"))
    return nodes, values


def _outputs(node: Node) -> Outputs | NotKnownError:
    rule = RULES.get(node.class_type)
    if rule is None:
        return node.unknown(_NO_RULE)
    try:
        returned = rule(node)
        outputs = returned if isinstance(returned, tuple) else (returned,)
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
        raise node.unknown("its output is empty")
    if max(sides) > _MAX_SIDE:
        raise node.unknown(f"its output is larger than {_MAX_SIDE} pixels a side or images")


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
        size=latent.pixels,
        batch=latent.batch,
        is_video=latent.is_video,
    )
    return sampling, guidance.warning


def _decoding(node: Node) -> Decoding:
    latent = node.latent("samples")
    tiled = "tile_size" in node.inputs
    return Decoding(
        node=node.id,
        label=node.label,
        vae=node.link("vae"),
        size=latent.pixels,
        batch=latent.batch,
        is_video=latent.is_video,
        tile_size=node.integer("tile_size") if tiled else None,
        overlap=node.integer("overlap", 64) if tiled else None,
    )


def _explain(cause: str, labels: Sequence[str]) -> str:
    more = f" and {len(labels) - _MAX_NAMED} more" if len(labels) > _MAX_NAMED else ""
    return f"{cause}. So Resolute does not know the size of: {', '.join(labels[:_MAX_NAMED])}{more}."
