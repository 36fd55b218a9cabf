"""Rules for conditioning and guiders: which model, positive, negative and cfg a sampler uses."""

from __future__ import annotations

import math

from .node import Guidance, Node, NotKnownError, Value


def no_size(node: Node) -> Value:
    """Conditioning and sound have no size. Their nodes need a rule only so that they count as known."""
    return None


def positive_and_negative(node: Node) -> Guidance:
    """KSampler, KSamplerAdvanced, SamplerCustom and CFGGuider."""
    return Guidance(node.link("model"), node.link("positive"), node.link("negative"), _scale(node, "cfg"))


def positive_only(node: Node) -> Guidance:
    """BasicGuider, which samples without a negative, as with a cfg of 1."""
    return Guidance(node.link("model"), node.link("conditioning"), None, 1.0)


def dual(node: Node) -> Guidance:
    """DualCFGGuider. It samples three conditionings, and Warm Up has inputs for two."""
    first, second = _scale(node, "cfg_conds"), _scale(node, "cfg_cond2_negative")
    model, positive = node.link("model"), node.link("cond1")
    # Core skips the negative if its scale is 1, unless the style is nested.
    if node.text("style", "regular") == "regular" and second is not None and math.isclose(second, 1.0):
        return Guidance(model, positive, node.link("cond2"), first)
    warning = "it samples three conditionings at once and Warm Up two, so its captures are made at first use"
    return Guidance(model, positive, node.link("negative"), second, f"{node.label}: {warning}.")


def from_guider(node: Node) -> Guidance:
    return node.guidance("guider")


def _scale(node: Node, name: str) -> float | None:
    """A cfg input; None if it is connected and its value is known only when the prompt runs."""
    try:
        return node.number(name)
    except NotKnownError:
        if name in node.links():
            return None
        raise
