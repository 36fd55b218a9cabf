"""Weights that consist of several tensors (quantized ones): split into parts, described, and put together again.

Core's weights list their parts by torch's protocol for traceable subclasses (`__tensor_flatten__`,
`__tensor_unflatten__`). The weights of GGUF files are bytes in one tensor, see `gguf_weights`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ..code_identity.content import class_digest
from .gguf_weights import GGUFForm, is_gguf, why_unknown
from .slots import all_parts

PLAIN = frozenset({torch.nn.Parameter, torch.Tensor})  # see `is_plain`


def is_plain(tensor: torch.Tensor) -> bool:
    """True if the tensor is one buffer, and not a subclass with its own layout."""
    return type(tensor) in PLAIN


class WeightForm(Protocol):
    """The composition of a weight: everything about it except the values of its parts.

    kind: the class of the weight. text: the whole form, with the shapes and dtypes of the parts; equal in every process
    for weights that compute alike.
    """

    @property
    def kind(self) -> type: ...

    @property
    def text(self) -> str: ...

    @property
    def layout(self) -> str:
        """The name of the layout, for users and tables: "TensorWiseINT8Layout"; empty if it is not quantized."""

    @property
    def count(self) -> int:
        """The number of its parts."""

    def parts(self, weight: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors that a weight of this form consists of, each plain or composite."""

    def rebuild(self, parts: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        """Return a weight of this form made of other parts, with the shape of `like`."""


@dataclass(frozen=True, slots=True, eq=False)
class FlattenedForm:
    """The form of a weight that lists its parts by torch's protocol.

    names: the attributes of the parts. context: the protocol's data to put them together.
    """

    kind: type
    names: tuple[str, ...]
    context: Any
    text: str

    @property
    def layout(self) -> str:
        named = self.context.get("layout_cls") if isinstance(self.context, dict) else None
        return named if isinstance(named, str) else self.kind.__name__

    @property
    def count(self) -> int:
        return len(self.names)

    def parts(self, weight: torch.Tensor) -> list[torch.Tensor]:
        return [getattr(weight, name) for name in self.names]

    def rebuild(self, parts: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        unflatten = getattr(self.kind, "__tensor_unflatten__")  # noqa: B009 (torch declares it nowhere)
        made: torch.Tensor = unflatten(dict(zip(self.names, parts, strict=True)), self.context, like.shape, None)
        return made


# Listing the parts of one weight takes 10 us, and a call reads hundreds of weights.
_forms: Any = WeakIdKeyDictionary()


def form_of(weight: torch.Tensor) -> WeightForm | None:
    """Return the form of a composite weight; None for a plain one, and for an unknown class or format."""
    if is_plain(weight):
        return None
    known: WeightForm | None = _forms.get(weight)
    return read_anew(weight) if known is None else known


def read_anew(weight: torch.Tensor) -> WeightForm | None:
    """Read the form of a weight again, because a part may have been replaced."""
    form = _forms[weight] = _read(weight)
    return form


def forms_in(module: torch.nn.Module | None) -> list[WeightForm]:
    """Return the forms of the composite parameters of a module and of all below it; buffers are left out."""
    own = [] if module is None else [part._parameters for part in all_parts(module) if part._parameters]
    found = [weight for each in own for weight in each.values() if weight is not None and type(weight) not in PLAIN]
    return [form for form in map(form_of, found) if form is not None]


def parts_of(weight: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that a weight consists of: itself, unless it is composite."""
    form = form_of(weight)
    return [weight] if form is None else form.parts(weight)


def why_unreadable(weight: torch.Tensor) -> str:
    """Return why a weight that is neither plain nor composite cannot be read, for users."""
    known = is_gguf(weight) and why_unknown(weight)
    return known or f"a weight is a {type(weight).__name__}, whose layout Resolute does not know"


def _read(weight: torch.Tensor) -> WeightForm | None:
    if is_gguf(weight):
        return None if why_unknown(weight) else GGUFForm(weight)
    if is_plain(weight) or not hasattr(type(weight), "__tensor_flatten__"):
        return None
    names, context = getattr(weight, "__tensor_flatten__")()  # noqa: B009 (torch declares it nowhere)
    described = [(name, tuple(part.shape), str(part.dtype)) for name in names for part in [getattr(weight, name)]]
    layout = getattr(weight, "layout_cls", None)  # torch calls its code, which no other code names
    code = class_digest(layout if isinstance(layout, type) else type(weight))
    return FlattenedForm(type(weight), tuple(names), context, repr((described, context, code)))
