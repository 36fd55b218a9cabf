"""The weights of a block as inputs of its regions. A weight of a new layout (quantized) enters here.

Compiled code takes the weights of a block as its first inputs, before the block's own, so all blocks of one structure
share it. `weight_inputs` says which tensors stand for the weights, `given_as_inputs` puts a trace's tensors in their
place, and `cast_pattern` says which weights a region can take.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager

import torch

from ..attribute_policy import ModuleAttributePolicy
from .slots import Slot, swapped
from .structure import parts

PLAIN_WEIGHTS = "plain"  # they reach the computation as they are
_PLAIN = (torch.nn.Parameter, torch.Tensor)


def is_plain(tensor: torch.Tensor) -> bool:
    """True if the tensor is one buffer, and no subclass with a layout of its own."""
    return type(tensor) in _PLAIN


def weight_slots(module: torch.nn.Module, without: Sequence[str] = ()) -> list[Slot]:
    """The slots of the weights of `module`, each weight once, in the order in which its regions take them.

    Callers keep the slots, not the tensors, and read them before each call: so a Parameter that was replaced (by a
    LoRA, by an unload) takes effect at once. `without`: children whose weights are left out.
    """
    return [slots[0] for slots in _tied_slots(module, without)]


def weight_inputs(slots: Iterable[Slot]) -> list[torch.Tensor]:
    """The inputs of a region for the weights in these slots: today one for each, since `cast_pattern` refuses all but
    plain tensors.

    A quantized weight would become several (its data, its scales). Then `given_as_inputs` must build it again from
    them, `cast_pattern` must let it in, and `structure_digest` must have its layout in it.
    """
    return [own[name] for own, name in slots]


def given_as_inputs(
    module: torch.nn.Module, without: Sequence[str], inputs: Sequence[torch.Tensor]
) -> AbstractContextManager[None]:
    """Inside, the weights of `module` are these inputs, in the order of `weight_slots`; a tied weight in each slot."""
    tied = zip(_tied_slots(module, without), inputs, strict=True)
    return swapped((*slot, tensor) for slots, tensor in tied for slot in slots)


def _tied_slots(module: torch.nn.Module, without: Sequence[str]) -> list[list[Slot]]:
    """Every slot of each weight: parameters first, then buffers."""
    inside = [part for _, part in parts(module, without)]
    found: dict[tuple[str, int], list[Slot]] = {}
    for member in ("_parameters", "_buffers"):
        for own in (getattr(part, member) for part in inside):
            for name, tensor in own.items():
                if tensor is not None:
                    found.setdefault((member, id(tensor)), []).append((own, name))
    return list(found.values())


def cast_pattern(
    casting: Iterable[torch.nn.Module],
    weights: Iterable[torch.Tensor],
    dtype: torch.dtype,
    device: torch.device,
    policy: ModuleAttributePolicy,
) -> str | None:
    """The form in which a block's weights reach a computation in `dtype`: PLAIN_WEIGHTS, or which of `casting` cast
    theirs. None if a region cannot take them: some are elsewhere, are no plain tensors, or are patched on their way in.

    casting: the block's modules that may cast or patch their weights before use, as `policy` says. A cast to another
    dtype is traced as a part of the region. A cast to the same dtype does nothing; the flag stays set on modules whose
    weights were streamed once. A patch is a Python function that may change between calls, so it cannot be traced.
    """
    casts = ""
    for module in casting:
        if policy.patches_weights(module):
            return None
        others = any(weight is not None and weight.dtype != dtype for weight in module._parameters.values())
        casts += "c" if others and policy.casts_now(module) else "-"
    if not all(weight.device == device and is_plain(weight) for weight in weights):
        return None
    return casts if "c" in casts else PLAIN_WEIGHTS
