"""A user's actions on an open workflow, drawn by hypothesis.

A sequence is a plain list of events, and an event is a plain tuple: ("set", "batch", 3), ("queue",). It is not a
RuleBasedStateMachine, so that a failing list can be printed, stored for `scripts/fuzz --replay` and edited by hand.
Every event is possible in every state, so that hypothesis can remove any of them to shorten a failing sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from .patches import PATCHES
from .workflow import NETS, QUANTIZED

Event = tuple[Any, ...]

SAMPLERS = (
    "euler", "euler_ancestral", "euler_cfg_pp", "heun", "dpm_2", "dpmpp_2m", "dpmpp_sde", "dpmpp_2m_sde", "ddim", "lcm",
    "uni_pc", "deis", "ipndm", "res_multistep", "lms", "er_sde", "seeds_2",
)  # fmt: skip
SCHEDULERS = ("normal", "karras", "simple", "sgm_uniform", "exponential", "beta", "ddim_uniform", "kl_optimal")
CONDITIONINGS = ("whole", "two", "concat", "in turn", "area", "mask", "mask bounds", "lora hook")

# Hypothesis prefers the first value of each, so simple values come first: they make the cause of a failure clearer.
# Mostly small sizes to save time, because attention costs the fourth power of the side.
_SIZE = st.one_of(st.integers(8, 18), st.integers(8, 18), st.integers(8, 32)).map(lambda eighths: 8 * eighths)
_TOKENS = st.sampled_from((77, 154, 231))


def _values(patches: Sequence[str]) -> dict[str, st.SearchStrategy[Any]]:
    return {
        "batch": st.integers(1, 4),
        "width": _SIZE,
        "height": _SIZE,
        "patches": st.lists(st.sampled_from(patches), max_size=3, unique=True),
        "at": st.integers(0, 3),
        "backend": st.sampled_from(("chosen", "chosen", "eager", "none")),
        "control": st.sampled_from(("none", "none", *NETS, "t2i adapter", "control lora")),
        "control_backend": st.sampled_from(("chosen", "chosen", "eager", "none")),
        "batching": st.sampled_from(("auto", "always merge", "always split")),
        "positive": _TOKENS,
        "negative": _TOKENS,
        "cfg": st.sampled_from((5.0, 1.0)),
        "steps": st.integers(2, 5),
        "sampler": st.sampled_from(SAMPLERS),
        "scheduler": st.sampled_from(SCHEDULERS),
        "denoise": st.sampled_from((1.0, 0.75, 0.5)),
        "weights": st.integers(0, 2),
        "kind": st.sampled_from(("sd", "sd", "sdxl", "inpaint", "fp8", *QUANTIZED, "counting")),
        "conditioning": st.sampled_from(CONDITIONINGS),
        "mask": st.sampled_from(("none", "half", "soft")),
        "second": st.sampled_from(("none", "none", "same", "unpatched", "plain", "other")),
        "source": st.sampled_from(("empty", "image")),
        "decode": st.sampled_from(("none", "none", "plain", "tiled", "one by one")),
        "vae_weights": st.integers(0, 1),
        "vae_backend": st.sampled_from(("chosen", "eager", "none")),
    }


# How often each action of ComfyUI is drawn.
_ACTIONS = ("queue",) * 7 + ("again",) * 3 + ("both",) * 3 + ("plain", "count", "cancel", "fail", "free") * 2


def _action(kind: str, change: st.SearchStrategy[tuple[str, Any]]) -> st.SearchStrategy[Event]:
    if kind == "both":
        return change.map(lambda pair: ("both", *pair))
    if kind in ("cancel", "fail"):
        return st.integers(0, 6).map(lambda number: (kind, number))
    return st.just((kind,))


def sequences(patches: Sequence[str] = tuple(PATCHES)) -> st.SearchStrategy[list[Event]]:
    """Open a workflow, then three to five times change something and run an action.

    ("open", {...}): another workflow, with the defaults of `Workflow` and the dictionary's values. ("set", name,
    value): change it. ("both", name, value): queue it and immediately a changed copy. ("queue",), and ("again",) with
    another seed: run and compare with ComfyUI's own result. ("plain",): run without Resolute's nodes. ("count",): also
    run with the backend that only counts forwards.
    """
    values = _values(patches)
    # The chain of patches affects most what runs, so change it more often than the rest.
    names = st.sampled_from(("patches", "at", "backend", *values))
    change = names.flatmap(lambda name: st.tuples(st.just(name), values[name]))
    opened = st.fixed_dictionaries({}, optional=values).map(lambda fields: ("open", fields))
    changes = st.lists(change.map(lambda pair: ("set", *pair)), max_size=4)
    action = st.sampled_from(_ACTIONS).flatmap(lambda kind: _action(kind, change))
    turn = st.tuples(changes, action).map(lambda parts: [*parts[0], parts[1]])
    turns = st.lists(turn, min_size=3, max_size=5).map(lambda turns: [event for turn in turns for event in turn])
    return st.tuples(opened, turns).map(lambda parts: [parts[0], *parts[1]])
