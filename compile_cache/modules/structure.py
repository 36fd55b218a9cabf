"""The structure of a module: everything that a trace of it can depend on, except the values of its weights.

Modules of equal structure share compiled code. If the digest contains too much, a region is compiled twice; if it
contains too little, images are wrong. So every plain attribute counts unless it is known not to matter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Sequence

import torch

from ..attribute_policy import PLAIN, ModuleAttributePolicy
from ..code_identity.attributes import HOOKED
from ..code_identity.content import TORCH_OWN as TORCH_OWN
from ..code_identity.content import described
from ..code_identity.functions import PLAIN as PLAIN_VALUES
from ..code_identity.functions import code_of, names_in
from ..code_identity.names import module_of
from ..keys import repr_digest
from .slots import all_parts, tensor_slots
from .weight_parts import form_of, is_plain

_SCALARS = frozenset({type(None), bool, int, float, str})
_NO_SETTINGS = TORCH_OWN | HOOKED


@dataclasses.dataclass(slots=True)
class Memo:
    """Digests by id(module), the names of classes, and whether their code reads `training` (core puts a UNet in
    evaluation mode, and leaves a ControlNet in training mode), for one survey of an unchanging model.
    """

    digests: dict[int, str] = dataclasses.field(default_factory=dict)
    names: dict[type, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    reads_mode: dict[type, bool] = dataclasses.field(default_factory=dict)


def parts(module: torch.nn.Module, without: Sequence[str] = ()) -> list[tuple[str, torch.nn.Module]]:
    """Return `module` and all modules below it, by name, except the children `without`."""
    inside = tuple(f"{child}." for child in without)
    found = [(name, part) for part, name in all_parts(module).items()]
    return [each for each in found if each[0] not in without and not each[0].startswith(inside)] if inside else found


def structure_digest(
    module: torch.nn.Module,
    memo: Memo | None = None,
    without: Sequence[str] = (),
    ignored: Collection[str] = (),
    policy: ModuleAttributePolicy = PLAIN,
) -> str:
    """Return a digest of `module` and all below it: classes, settings, and the shapes, dtypes and ties of weights.

    memo: shares the digests of parts between calls, so that a survey of a model computes each part once.
    without: children of `module` to leave out. ignored: names of plain attributes that do not matter. policy: says
    which attributes are no part of the structure, and for which classes the source is a part.
    """
    ties = _ties([part for _, part in parts(module, without)])
    return repr_digest((ties, _digest(module, memo or Memo(), policy, True, without, ignored)))


def _digest(
    module: torch.nn.Module,
    memo: Memo,
    policy: ModuleAttributePolicy,
    is_root: bool = False,
    without: Sequence[str] = (),
    ignored: Collection[str] = (),
) -> str:
    known = None if is_root else memo.digests.get(id(module))
    if known is not None:
        return known
    kind = type(module)
    if kind not in memo.names:
        memo.names[kind] = (module_of(kind), kind.__qualname__, *policy.sources(kind))
    weights = [
        (name, tuple(tensor.shape), tensor.stride(), str(tensor.dtype), type(tensor).__name__, _form(tensor))
        for own, name in tensor_slots(module)
        for tensor in [own[name]]
    ]
    # A torch hook can do anything before or after this module, so it makes the module different from all others.
    torchs = (module._forward_hooks, module._forward_pre_hooks)
    hooks = tuple([id(hook) for hooks in torchs if hooks for hook in hooks.values()])
    children = [
        (name, _digest(child, memo, policy, ignored=ignored))
        for name, child in (module._modules.items() if module._modules else ())
        if child is not None and name not in without
    ]
    if kind not in memo.reads_mode:
        memo.reads_mode[kind] = "training" in names_in(code_of({kind}))
    has_mode = memo.reads_mode[kind] and not (kind is torch.nn.Dropout and module.p == 0)
    left_out = ignored if has_mode else {*ignored, "training"}
    # No name occurs twice.
    own = sorted([each for each in settings(module, is_root, policy) if each[0] not in left_out])
    result = repr_digest((*memo.names[kind], tuple(weights), tuple(own), hooks, tuple(children)))
    if not is_root:
        memo.digests[id(module)] = result
    return result


def _form(weight: torch.Tensor) -> str:
    form = None if is_plain(weight) else form_of(weight)
    return "" if form is None else form.text


def settings(
    module: torch.nn.Module, is_root: bool, policy: ModuleAttributePolicy = PLAIN
) -> tuple[tuple[str, object], ...]:
    """Return the plain attributes of one module: (name, value), in the order in which they were set.

    `is_root`: the module is the one that runs through the cache, not a part of it. Then its `HOOKED` attributes do not
    count: they are ours, or the remains of a removed patch. policy: see `structure_digest`.
    """
    switch, reader = policy.switch
    return tuple(
        [
            (name, value if type(value) in _SCALARS else described(value))
            for name, value in vars(module).items()
            if name not in TORCH_OWN and not policy.is_bookkeeping(name) and not (is_root and name in HOOKED)
            if name != switch or (value and hasattr(module, reader))
        ]
    )


def unknown_setting(modules: Collection[torch.nn.Module], policy: ModuleAttributePolicy = PLAIN) -> str:
    """Name an attribute that these modules' code reads and that `settings` cannot describe; empty if there is none."""
    left_out = _NO_SETTINGS | policy.bookkeeping
    for module in modules:
        for name, value in vars(module).items():
            if type(value) in PLAIN_VALUES or name in left_out or policy.is_bookkeeping(name):
                continue
            unknown: list[str] = []
            described(value, unknown)
            if unknown and name in names_in(code_of(set(map(type, modules)))):
                return f"'{type(module).__name__}.{name}' is a {unknown[0]}"
    return ""


def _ties(modules: Iterable[torch.nn.Module]) -> tuple[int, ...]:
    """Return a number for each weight, in order; equal numbers mean the same tensor."""
    numbers: dict[int, int] = {}
    return tuple([numbers.setdefault(id(own[name]), len(numbers)) for own, name in tensor_slots(*modules)])
