"""Builds prompts with ControlNets, plain and compiled."""

from __future__ import annotations

import copy
from typing import Any

from ..rig import PromptDict, Run, compiled, failure_of, node
from .kit import Check

STEPS = 4
BOTH = 2 * STEPS  # forwards of the UNet, and as many of one ControlNet
SIDES = ("positive", "negative")
# Kind and seed of the ControlNets that `controlled` knows by name.
NETS = {
    "net": ("sd", 21),
    "other": ("sd", 22),
    "sdxl": ("sdxl", 23),
    "union": ("union", 24),
    "adapter": ("t2i adapter", 25),
    "lora": ("control lora", 26),
}


def hint(seed: int = 5, width: int = 136, height: int = 104, batch: int = 1, channels: int = 3) -> dict[str, Any]:
    """The hint image of a ControlNet."""
    return node("ResoluteTestHint", seed=seed, width=width, height=height, batch=batch, channels=channels)


def controlled(
    prompt: PromptDict,
    *nets: str,
    on: tuple[str, ...] = SIDES,
    picture: dict[str, Any] | None = None,
    **settings: float,
) -> PromptDict:
    """A copy of the prompt with these ControlNets, chained, on the conditions of these sides.

    nets: keys of NETS, or of nodes that the prompt has. settings: strength, start_percent, end_percent.
    """
    changed = copy.deepcopy(prompt)
    changed["hint"] = picture or hint()
    links = {side: [side, 0] for side in SIDES}
    values = {"strength": 1.0, "start_percent": 0.0, "end_percent": 1.0, **settings}
    for number, name in enumerate(nets):
        if name not in changed:
            kind, seed = NETS[name]
            changed[name] = node("ResoluteTestControlNet", kind=kind, seed=seed)
        inputs: dict[str, Any] = {**links, "control_net": [name, 0], "image": ["hint", 0], **values}
        changed[f"apply-{number}"] = node("ControlNetApplyAdvanced", **inputs)
        links |= {side: [f"apply-{number}", slot] for slot, side in enumerate(SIDES) if side in on}
    changed["sample"]["inputs"].update(links)
    return changed


def with_compiled_nets(prompt: PromptDict, backend: str, *, but: tuple[str, ...] = ()) -> PromptDict:
    """A copy of the prompt with a Compile ControlNet after each ControlNet's source, except those in `but`."""
    changed = copy.deepcopy(prompt)
    for name, part in prompt.items():
        source = part["inputs"].get("control_net", [""])[0]
        if source in NETS and source not in but:
            compiled_name = f"compiled-{source}"
            changed[compiled_name] = node("ResoluteCompileControlNet", control_net=[source, 0], backend=backend)
            changed[name]["inputs"]["control_net"] = [compiled_name, 0]
    return changed


def all_compiled(prompt: PromptDict, backend: str) -> PromptDict:
    """A copy of the prompt with model, decoder and every ControlNet compiled."""
    return with_compiled_nets(compiled(prompt, backend), backend)


def check_control(check: Check, plain: PromptDict, forwards: int = BOTH, **expected: Any) -> Run:
    """Check the prompt with everything in it compiled."""
    return check(plain, all_compiled(plain, check.backend), forwards=forwards, **expected)


def assert_cores_error(check: Check, prompt: PromptDict, text: str) -> None:
    """Assert that the prompt fails with core's message, which has `text` in it, compiled and not."""
    message = failure_of(check.bench.client, prompt)
    assert text in message
    assert failure_of(check.bench.client, all_compiled(prompt, check.backend)) == message
