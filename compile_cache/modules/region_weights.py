"""The weights of a block as inputs of its regions.

Compiled code takes the weights of a block as its first inputs, before the block's own, so all blocks of one structure
share it. `weight_inputs` returns the tensors of the weights, `weights_from_inputs` replaces them by a trace's tensors,
and `cast_pattern` checks that a region supports the weights. A quantized weight is several inputs: its parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager

import torch

from ..attribute_policy import ModuleAttributePolicy
from ..errors import BypassCode, BypassReason
from .slots import Slot, swapped
from .structure import parts
from .weight_parts import PLAIN, form_of, is_plain, parts_of, why_unreadable

_FLOATS_OF_8_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)
PLAIN_WEIGHTS = "plain"  # no weight is cast before the computation
_STREAMED = BypassReason(
    BypassCode.STREAMED_WEIGHTS,
    "weights are not all on the device (low VRAM); blocks with such weights run eagerly",
)
_PATCHED = BypassReason(
    BypassCode.STREAMED_WEIGHTS,
    "weights are patched on their way in (low VRAM); blocks with such weights run eagerly",
)


def weight_slots(module: torch.nn.Module, without: Sequence[str] = ()) -> list[Slot]:
    """Return the slots of the weights of `module`, each weight once, in the order of its regions' inputs.

    Callers keep the slots, not the tensors, and read them before each call, so that a replaced Parameter (by a LoRA, by
    an unload) takes effect at once. `without`: children whose weights are left out.
    """
    return [slots[0] for slots in _tied_slots(module, without)]


def weight_inputs(slots: Iterable[Slot]) -> list[torch.Tensor]:
    """Return a region's inputs for the weights in these slots: the parts of each weight, one after the other."""
    weights = [own[name] for own, name in slots]
    if PLAIN.issuperset(map(type, weights)):
        return weights
    return [part for weight in weights for part in ((weight,) if is_plain(weight) else parts_of(weight))]


def weight_layouts(slots: Iterable[Slot]) -> list[str]:
    """Return, for each of `weight_inputs`, the layout of the quantized weight whose numbers it contains, or "".

    For a plain weight in fp8, the layout is the name of its dtype: "float8_e4m3fn".
    """
    found: list[str] = []
    for own, name in slots:
        form = form_of(own[name])
        found += [_of_plain(own[name])] if form is None else [form.layout, *[""] * (form.count - 1)]
    return found


def _of_plain(weight: torch.Tensor) -> str:
    return str(weight.dtype).removeprefix("torch.") if weight.dtype in _FLOATS_OF_8_BITS else ""


def weight_forms(slots: Iterable[Slot]) -> tuple[tuple[int, str], ...]:
    """Return (number of the slot, form) of each composite weight in these slots; empty if all are plain."""
    weights = [own[name] for own, name in slots]
    if PLAIN.issuperset(map(type, weights)):
        return ()
    forms = [(number, form_of(weight)) for number, weight in enumerate(weights) if not is_plain(weight)]
    return tuple([(number, "" if form is None else form.text) for number, form in forms])


def weights_from_inputs(
    module: torch.nn.Module, without: Sequence[str], inputs: Sequence[torch.Tensor]
) -> AbstractContextManager[None]:
    """Inside, the weights of `module` are built from these inputs, in the order of `weight_inputs`; a tied weight fills
    each of its slots. Raises ValueError for a wrong number of inputs.
    """
    tied = [(slots, own[name]) for slots in _tied_slots(module, without) for own, name in slots[:1]]
    counts = [1 if form is None else form.count for form in (form_of(weight) for _, weight in tied)]
    if len(inputs) != sum(counts):
        raise ValueError(f"{len(inputs)} inputs are shorter or longer than the {sum(counts)} parts of the weights")
    values, given = [], iter(inputs)
    for (slots, weight), count in zip(tied, counts, strict=True):
        own_parts = [next(given) for _ in range(count)]
        form = form_of(weight)
        made = own_parts[0] if form is None else form.rebuild(own_parts, weight)
        values += [(*slot, made) for slot in slots]
    return swapped(values)


def _tied_slots(module: torch.nn.Module, without: Sequence[str]) -> list[list[Slot]]:
    """Return every slot of each weight: parameters first, then buffers."""
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
    slots: Sequence[Slot],
    dtype: torch.dtype,
    device: torch.device,
    policy: ModuleAttributePolicy,
) -> str | BypassReason:
    """Return the form in which a block's weights enter a computation in `dtype`: PLAIN_WEIGHTS, or a text of the casts
    of modules and the layouts of quantized weights. Returns the reason if a region does not support them: some are on
    another device, are of an unknown subclass, or are patched before use.

    casting: the block's modules that may cast or patch their weights before use, according to `policy`. A cast to
    another dtype is traced as part of the region. A cast to the same dtype does nothing; the flag stays set on modules
    that once streamed weights. A patch is a Python function that may change between calls, so it cannot be traced.
    """
    weights = [own[name] for own, name in slots]
    unknown = next((weight for weight in weights if not _is_known(weight, policy)), None)
    if unknown is not None:
        what = why_unreadable(unknown)
        return BypassReason(BypassCode.UNREADABLE_WEIGHTS, f"{what}; blocks with such weights run eagerly")
    casts = ""
    for module in casting:
        if policy.patches_weights(module):
            return _PATCHED
        others = any(weight is not None and weight.dtype != dtype for weight in module._parameters.values())
        casts += "c" if others and policy.casts_now(module) else "-"
    if any(part.device != device for weight in weights for part in parts_of(weight)):
        return _STREAMED
    forms = weight_forms(slots)
    pattern = casts if "c" in casts else PLAIN_WEIGHTS
    return f"{pattern} {forms}" if forms else pattern


def _is_known(weight: torch.Tensor, policy: ModuleAttributePolicy) -> bool:
    if is_plain(weight):
        return True
    form = form_of(weight)
    return form is not None and policy.knows_layout(form.kind) and all(map(is_plain, form.parts(weight)))
