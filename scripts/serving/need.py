"""What a workflow needs to be warm, as digests of its text. Replicas are ranked by them."""

from __future__ import annotations

import graphlib
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

ImageSize = Callable[[str], "tuple[int, int] | None"]

# Inputs that change the picture, and no shape and no compiled code.
_NOT_COUNTED = ("seed", "noise_seed", "steps", "denoise", "sampler_name", "scheduler", "filename_prefix")
_TEXTS = ("clip_l", "clip_g", "t5xxl")
_WORDS_OF_TEXTS = {"text", "prompt"}  # in names: text_g, negative_prompt
_MODEL_FILES = (".safetensors", ".sft", ".ckpt", ".pt", ".pth", ".bin", ".gguf")
_COMPILERS = ("Resolute", "OneDiff")


@dataclass(frozen=True, slots=True)
class Need:
    """Empty parts match anything.

    shapes: the digest of the workflow without what two warm prompts may differ in: seeds, texts, names of outputs.
    chains: the digest of its model files and compile nodes alone. files: a digest of each model file.
    """

    shapes: tuple[str, ...] = ()
    chains: tuple[str, ...] = ()
    files: tuple[str, ...] = ()

    def plain(self) -> dict[str, Any]:
        """As an argument of a call, where the router reads it."""
        return {"shapes": list(self.shapes), "chains": list(self.chains), "files": list(self.files)}


def need_of(prompt: Any, image_size: ImageSize | None = None) -> Need:
    """What a workflow in API form needs. Nothing is known of anything else: ComfyUI will say what is wrong with it.

    image_size: width and height of a picture in the input folder, which then count in place of its name.
    """
    nodes = {name: node for name, node in prompt.items() if _is_node(node)} if isinstance(prompt, Mapping) else {}
    counted = {name: _counted(node, image_size) for name, node in nodes.items()}
    linked = {name: set(_links(inputs).values()) & nodes.keys() for name, inputs in counted.items()}
    try:
        order = list(graphlib.TopologicalSorter(linked).static_order())
    except graphlib.CycleError:
        return Need()
    digests: dict[str, str] = {}
    for name in order:
        inputs = counted[name]
        sources = [[each, digests.get(source, ""), inputs[each][1]] for each, source in sorted(_links(inputs).items())]
        digests[name] = _digest([nodes[name]["class_type"], _typed_in(inputs), sources])
    used = {source for node in nodes.values() for source in _links(node["inputs"]).values()}
    ends = sorted(digests[name] for name in nodes.keys() - used)
    if not ends:
        return Need()
    files = sorted({value for inputs in counted.values() for value in inputs.values() if _is_model_file(value)})
    compilers = [
        _text([nodes[name]["class_type"], _typed_in(inputs)])
        for name, inputs in counted.items()
        if nodes[name]["class_type"].startswith(_COMPILERS)
    ]
    chains = (_digest([files, sorted(compilers)]),) if files or compilers else ()
    return Need((_digest(ends),), chains, tuple(map(_digest, files)))


def _counted(node: Mapping[str, Any], image_size: ImageSize | None) -> dict[str, Any]:
    """The inputs of a node that count, with the size of a picture in place of its name."""
    holds_text = node["class_type"].startswith("PrimitiveString")
    inputs = {}
    for name, value in node["inputs"].items():
        if name in _NOT_COUNTED or (holds_text and name == "value") or _is_text(name, value):
            continue
        if name == "cfg" and isinstance(value, (int, float)):
            value = value == 1  # without a negative, which is another shape
        if name == "image" and isinstance(value, str) and image_size is not None:
            value = image_size(value) or value
        inputs[name] = value
    return inputs


def _is_text(name: str, value: Any) -> bool:
    is_named_so = name in _TEXTS or bool(_WORDS_OF_TEXTS & set(name.split("_")))
    return is_named_so and (isinstance(value, str) or _is_link(value))


def _typed_in(inputs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in inputs.items() if not _is_link(value)}


def _links(inputs: Mapping[str, Any]) -> dict[str, str]:
    """Input name -> id of the node that is linked into it."""
    return {name: value[0] for name, value in inputs.items() if _is_link(value)}


def _is_node(node: Any) -> bool:
    if not isinstance(node, Mapping) or not isinstance(node.get("class_type"), str):
        return False
    return isinstance(node.get("inputs"), Mapping) and all(isinstance(name, str) for name in node["inputs"])


def _is_link(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and isinstance(value[0], str)


def _is_model_file(value: Any) -> bool:
    return isinstance(value, str) and value.lower().endswith(_MODEL_FILES)


def _digest(value: Any) -> str:
    return hashlib.sha256(_text(value).encode("utf-8", "replace")).hexdigest()[:12]


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)
