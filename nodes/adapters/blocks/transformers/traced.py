"""The function of a recognised block's regions: the block's own forward, with the arguments of one layout."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from ..common import UnusableArgumentError, original
from .arguments import Layout, rebuild
from .options import BlockOptions, Reads
from .shares import ANSWERS, RESULTS, Share, Stop

_aten = torch.ops.aten

OPTIONS = "transformer_options"
POSITION = "*"  # with a number appended: a positional argument without a parameter name


def run_block(
    layout: Layout,
    kind: str,
    reads: Reads | None,
    written: Sequence[int],
    stop: Stop | None,
    broadcastable: Collection[int],
    block: torch.nn.Module,
    *inputs: torch.Tensor,
) -> tuple[Any, list[torch.Tensor]]:
    """The function of a site. Returns the block's result, and the new contents of the tensors `written`.

    A region must not write to its inputs, so the block gets clones of `written`. reads: None for a block that is called
    without transformer_options. stop: the cut at which the site ends; its tensors are then the result. broadcastable:
    tensors with one row for the batch or one for each picture. Raises UnusableArgumentError if the block ends at
    another cut.
    """
    own = [tensor.clone() if number in written else tensor for number, tensor in enumerate(inputs)]
    own = [
        _a_row_for_each(tensor, inputs[0]) if number in broadcastable else tensor for number, tensor in enumerate(own)
    ]
    given = rebuild(layout, own)
    share = Share(given.pop(ANSWERS, ()), given.pop(RESULTS, {}), () if stop is None else stop.kept)
    if reads is not None:
        given[OPTIONS] = BlockOptions(kind, reads, at_cut=share.at_cut)
    result = share.run(block, functools.partial(call_original, block, given))
    if share.stop != stop:
        raise UnusableArgumentError("it does not call other code in the same order every time")
    return result, [own[number] for number in written] if stop is None else []


def _a_row_for_each(tensor: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    """Repeat the tensor's rows to the batch of `first` if their number is a symbol of a trace: it may stand for 1."""
    if not isinstance(tensor.shape[0], torch.SymInt):
        return tensor
    place = torch.arange(first.shape[0], device=tensor.device) % tensor.shape[0]
    rows: torch.Tensor = _aten._unsafe_index(tensor, [place])
    return rows


def copied_back(result: Any, written: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> Any:
    """Copy what the block wrote to clones back to the caller's tensors. Returns the result with the latter in it."""
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
