"""Rules for texts, for guiders, and for what a sampler takes."""

from __future__ import annotations

import math

from .node import Guidance, Node, NotKnownError, Value


def unsized(node: Node) -> Value:
    """Texts have no size; Warm Up gets the nodes that make them."""
    return None


def two_texts(node: Node) -> Guidance:
    """KSampler and its relatives, and CFGGuider."""
    return Guidance(node.link("model"), node.link("positive"), node.link("negative"), _scale(node, "cfg"))


def one_text(node: Node) -> Guidance:
    return Guidance(node.link("model"), node.link("conditioning"), None, 1.0)


def three_texts(node: Node) -> Guidance:
    first, second = _scale(node, "cfg_conds"), _scale(node, "cfg_cond2_negative")
    model, positive = node.link("model"), node.link("cond1")
    # core leaves out what a scale of 1 cancels, unless the guidance is nested
    if node.text("style", "regular") == "regular" and second is not None and math.isclose(second, 1.0):
        return Guidance(model, positive, node.link("cond2"), first)
    remark = "it samples with three texts at once and Warm Up knows two, so its captures are made at first use"
    return Guidance(model, positive, node.link("negative"), second, f"{node.label}: {remark}.")


def from_guider(node: Node) -> Guidance:
    return node.guidance("guider")


def _scale(node: Node, name: str) -> float | None:
    try:
        return node.number(name)
    except NotKnownError:
        if name in node.links():
            return None
        raise
