"""Weights that consist of several tensors (quantized ones): taken apart, described, and put together again.

They list their parts by torch's protocol for traceable subclasses (`__tensor_flatten__`, `__tensor_unflatten__`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

_PLAIN = (torch.nn.Parameter, torch.Tensor)


def is_plain(tensor: torch.Tensor) -> bool:
    """True if the tensor is one buffer, and no subclass with a layout of its own."""
    return type(tensor) in _PLAIN


def is_composite(tensor: torch.Tensor) -> bool:
    """True if the tensor can list the tensors that it consists of."""
    return hasattr(type(tensor), "__tensor_flatten__") and not is_plain(tensor)


@dataclass(frozen=True, slots=True, eq=False)
class WeightForm:
    """How a weight consists of its parts: everything about it but their values.

    names: the attributes that hold the parts. context: what the protocol needs to put them together. text: all of it,
    with the shapes and dtypes of the parts; equal in every process for weights that compute alike.
    """

    kind: type
    names: tuple[str, ...]
    context: Any
    text: str

    @property
    def layout(self) -> str:
        """The name of the layout, for people and for tables: "TensorWiseINT8Layout"."""
        named = self.context.get("layout_cls") if isinstance(self.context, dict) else None
        return named if isinstance(named, str) else self.kind.__name__

    def put_together(self, parts: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        """A weight of this form from other parts, with the shape of `like`."""
        unflatten = getattr(self.kind, "__tensor_unflatten__")  # noqa: B009 (torch declares it nowhere)
        made: torch.Tensor = unflatten(dict(zip(self.names, parts, strict=True)), self.context, like.shape, None)
        return made


# To list the parts of one weight takes 10 us, and a call reads hundreds of weights.
_forms: Any = WeakIdKeyDictionary()


def form_of(weight: torch.Tensor) -> WeightForm | None:
    """The form of a composite weight; None for any other."""
    if is_plain(weight):
        return None
    known: WeightForm | None = _forms.get(weight)
    if known is None and is_composite(weight):
        known = _forms[weight] = _read(weight)
    return known


def read_anew(weight: torch.Tensor) -> tuple[str, ...]:
    """Read the form of a weight again, because a part may be another. Returns the names of the parts, if it has any."""
    if not is_composite(weight):
        return ()
    form = _forms[weight] = _read(weight)
    return form.names


def parts_of(weight: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that a weight consists of: itself, unless it is composite."""
    form = form_of(weight)
    return [weight] if form is None else [getattr(weight, name) for name in form.names]


def _read(weight: torch.Tensor) -> WeightForm:
    names, context = getattr(weight, "__tensor_flatten__")()  # noqa: B009 (torch declares it nowhere)
    described = [(name, tuple(part.shape), str(part.dtype)) for name in names for part in [getattr(weight, name)]]
    return WeightForm(type(weight), tuple(names), context, repr((described, context)))
