"""The functions of a recognised block's regions: its own forward, with the arguments of a layout."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from ..common import UnusableArgumentError, original
from .arguments import Layout, put_together
from .options import BlockOptions, Reads
from .shares import ANSWERS, RESULTS, Share, Stop

_aten = torch.ops.aten

OPTIONS = "transformer_options"
POSITION = "*"  # with a number: an argument of a forward that names none


def run_block(
    layout: Layout,
    kind: str,
    reads: Reads | None,
    written: Sequence[int],
    stop: Stop | None,
    either: Collection[int],
    block: torch.nn.Module,
    *inputs: torch.Tensor,
) -> tuple[Any, list[torch.Tensor]]:
    """The function of a site: the block's result, and what it wrote to the tensors `written`.

    A region must not write to its inputs, so the block gets clones of them. reads: None for a block that is called
    without transformer_options. stop: the cut at which the site ends, whose tensors are the result. either: tensors
    with one row for all of the batch, or a row for each. Raises UnusableArgumentError where the block ends elsewhere.
    """
    own = [tensor.clone() if number in written else tensor for number, tensor in enumerate(inputs)]
    own = [_a_row_for_each(tensor, inputs[0]) if number in either else tensor for number, tensor in enumerate(own)]
    given = put_together(layout, own)
    share = Share(given.pop(ANSWERS, ()), given.pop(RESULTS, {}), () if stop is None else stop.kept)
    if reads is not None:
        given[OPTIONS] = BlockOptions(kind, reads, meet=share.meet)
    result = share.run(block, functools.partial(call_original, block, given))
    if share.stop != stop:
        raise UnusableArgumentError("it does not call other code in the same order every time")
    return result, [own[number] for number in written] if stop is None else []


def _a_row_for_each(tensor: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    """The tensor with as many rows as the first one: where a trace has a symbol for its own, that may be 1 too."""
    if not isinstance(tensor.shape[0], torch.SymInt):
        return tensor
    place = torch.arange(first.shape[0], device=tensor.device) % tensor.shape[0]
    rows: torch.Tensor = _aten._unsafe_index(tensor, [place])
    return rows


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
