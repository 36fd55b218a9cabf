"""The functions of a recognised block's regions: its own forward, with the arguments of a layout."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..common import original
from .arguments import Layout, put_together
from .experts import Cut, run_after, run_before
from .options import BlockOptions, Reads

OPTIONS = "transformer_options"
POSITION = "*"  # with a number: an argument of a forward that names none
# What the second region of a block with a routed part gets beside the block's arguments.
RESULTS = "results of the parts before"
MADE = "result of the routed part"


def run_block(
    layout: Layout,
    kind: str,
    reads: Reads | None,
    written: Sequence[int],
    block: torch.nn.Module,
    *inputs: torch.Tensor,
) -> tuple[Any, list[torch.Tensor]]:
    """The function of a site: the block's result, and what it wrote to the tensors `written`.

    A region must not write to its inputs, so the block gets clones of them. reads: None for a block that is called
    without transformer_options.
    """
    own = [tensor.clone() if number in written else tensor for number, tensor in enumerate(inputs)]
    return call_original(block, _given(layout, kind, reads, own)), [own[number] for number in written]


def run_before_routed(
    layout: Layout, kind: str, reads: Reads | None, cut: Cut, block: torch.nn.Module, *inputs: torch.Tensor
) -> tuple[list[Any], torch.Tensor]:
    """The function of a site before a routed part, see `run_before`."""
    given = _given(layout, kind, reads, inputs)
    return run_before(block, cut, functools.partial(call_original, block, given))


def run_after_routed(
    layout: Layout, kind: str, reads: Reads | None, cut: Cut, block: torch.nn.Module, *inputs: torch.Tensor
) -> Any:
    """The function of a site after a routed part, see `run_after`."""
    given = _given(layout, kind, reads, inputs)
    results, made = given.pop(RESULTS), given.pop(MADE)
    return run_after(block, cut, functools.partial(call_original, block, given), results, made)


def _given(layout: Layout, kind: str, reads: Reads | None, inputs: Sequence[torch.Tensor]) -> dict[str, Any]:
    given = put_together(layout, inputs)
    if reads is not None:
        given[OPTIONS] = BlockOptions(kind, reads)
    return given


def copied_back(result: Any, written: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> Any:
    """Write to the caller's tensors what the block wrote to clones of them. Returns the result, with those in it."""
    callers = {}
    for tensor, value in zip(tensors, written, strict=True):
        callers[id(value)] = tensor.copy_(value)
    if isinstance(result, torch.Tensor):
        return callers.get(id(result), result)
    if callers and type(result) in (tuple, list):
        return type(result)(callers.get(id(each), each) for each in result)
    return result


def call_original(block: torch.nn.Module, given: Mapping[str, Any]) -> Any:
    positional = [value for name, value in given.items() if name.startswith(POSITION)]
    return original(block, *positional, **{k: v for k, v in given.items() if not k.startswith(POSITION)})
