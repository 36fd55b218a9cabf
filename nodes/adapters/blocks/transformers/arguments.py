"""Flattens the arguments of a block into tensors, integers and plain values, and rebuilds them."""

from __future__ import annotations

import enum
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .....compile_cache.code_identity.content import described
from .....compile_cache.modules.gguf_weights import without_class
from .....compile_cache.modules.site import Dims
from ..common import UnusableArgumentError
from .catalogue import rebuild_spec

# The structure of arguments as nested tuples. Arguments of equal layouts differ only in tensors and integers.
Layout = tuple[Any, ...]

_TENSOR: Layout = ("tensor",)
_NUMBER: Layout = ("number",)
_PLAIN = (bool, float, str, torch.dtype, torch.device, torch.memory_format)
_LARGEST = 2**62  # torch supports sizes up to this
_SLICE = ("start", "stop", "step")


@dataclass(frozen=True, slots=True)
class _Value:
    """A plain value, compared by its description: 0.0 differs from -0.0, and no `__eq__` of its class runs."""

    text: str
    value: Any = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Arguments:
    """layout: see `Layout`. tensors: in the order of the layout. numbers: integers above 1, in the same order.

    names: for each tensor, the name of the argument that contains it.
    """

    layout: Layout
    tensors: list[torch.Tensor]
    numbers: list[int]
    names: list[str]

    def inputs(self) -> list[torch.Tensor]:
        """The inputs of a region: the tensors, and an empty tensor of shape (n, 0) for each number n.

        Tracing makes symbols only of sizes, so a number is passed as a size.
        """
        empty = self.tensors[0]
        return [*self.tensors, *[empty.new_empty((number, 0)) for number in self.numbers]]


def flatten(given: Mapping[str, Any]) -> Arguments:
    """Flatten the arguments of a call, which are keyed by name. Raises UnusableArgumentError, which names one."""
    tensors: list[torch.Tensor] = []
    numbers: list[int] = []
    names: list[str] = []
    layout: list[Any] = []
    for name, value in given.items():
        try:
            layout.append((name, _layout(name, value, tensors, numbers)))
        except UnusableArgumentError:
            raise
        except Exception as error:  # raised by the code of the argument's class
            raise UnusableArgumentError(f"its argument '{name}' cannot be described") from error
        names += [name] * (len(tensors) - len(names))
    return Arguments(tuple(layout), tensors, numbers, names)


def rebuild(layout: Layout, inputs: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Rebuild the arguments, by name, from a layout and `Arguments.inputs`."""
    count = sum(1 for each in _leaves(layout) if each is _TENSOR or each == _TENSOR)
    tensors, numbers = iter(inputs[:count]), iter(inputs[count:])
    return {name: _value(part, tensors, numbers) for name, part in layout}


def dims_of(arguments: Arguments, shared: frozenset[int] = frozenset()) -> tuple[Dims, ...]:
    """The dimensions of a region's inputs. Each one is a separate symbol, except those of size 1.

    Tracing adds a guard where two sizes must be equal, or where one must be a certain number (a width). So no names
    need to declare sizes equal, and sizes that are equal by chance stay independent.

    A first dimension of size 1 is a batch of one, a symbol that is traced as 2 (see `general_hints`), except in
    `shared`: indices of tensors whose first dimension is 1 at any batch size.

    In a table of rotations only the batch and the tokens are symbols. The trace cannot infer that the number of heads
    is fixed, and kernels would divide by it for each element.
    """
    return _dims_of(tuple(tensor.shape for tensor in arguments.tensors), len(arguments.numbers), shared)


@functools.lru_cache(maxsize=1024)
def _dims_of(shapes: tuple[torch.Size, ...], numbers: int, shared: frozenset[int]) -> tuple[Dims, ...]:
    found = []
    for number, shape in enumerate(shapes):
        fixed = _fixed_in_rotations(shape)
        found.append(
            tuple(
                _name(number, axis)
                if axis not in fixed and (size != 1 or (axis == 0 and number not in shared))
                else None
                for axis, size in enumerate(shape)
            )
        )
    return (*found, *[(f"n{index}", None) for index in range(numbers)])


def _fixed_in_rotations(shape: Sequence[int]) -> Sequence[int]:
    """The dimensions of a table of rotations that do not depend on the latent's size; empty for other shapes.

    The table is (batch, tokens, heads or 1, half of a head, 2, 2), or (batch, 1, tokens, half of a head, 2, 2).
    """
    if len(shape) != 6 or tuple(shape[-2:]) != (2, 2):
        return ()
    return (1 if shape[1] == 1 else 2, 3, 4, 5)


def _name(number: int, axis: int) -> str:
    return f"b{number}" if axis == 0 else f"{number}.{axis}"


def shared_by_batch(arguments: Arguments) -> frozenset[int]:
    """Indices of the tensors whose first dimension is 1 in a call with a larger batch."""
    if arguments.tensors[0].shape[:1] == (1,):
        return frozenset()
    return frozenset(
        number for number, tensor in enumerate(arguments.tensors) if tensor.ndim > 0 and tensor.shape[0] == 1
    )


def _layout(name: str, value: Any, tensors: list[torch.Tensor], numbers: list[int]) -> Layout:
    value = without_class(value)
    kind = type(value)
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        tensors.append(value)
        return _TENSOR
    if kind is int and 1 < value <= _LARGEST:  # 0 and 1 are often switches, and a symbol cannot be 0 or 1
        numbers.append(value)
        return _NUMBER
    if value is None or kind is int or issubclass(kind, (*_PLAIN, enum.Enum)):
        unknown: list[str] = []
        text = repr(described(value, unknown))
        if unknown:
            raise UnusableArgumentError(f"its argument '{name}' holds a {kind.__name__}")
        return ("value", _Value(text, value))
    if kind in (tuple, list, torch.Size):
        parts = (_layout(f"{name}[{i}]", item, tensors, numbers) for i, item in enumerate(value))
        return ("items", kind, *parts)
    if kind is slice:  # flattened, since a slice is unhashable before Python 3.12
        parts = (_layout(f"{name}.{each}", getattr(value, each), tensors, numbers) for each in _SLICE)
        return ("object", kind, *parts)
    if kind is dict and all(isinstance(key, str) for key in value):
        return ("dict", *((key, _layout(f"{name}.{key}", item, tensors, numbers)) for key, item in value.items()))
    made = rebuild_spec(kind)
    if made is not None:
        parts = (_layout(f"{name}.{each}", getattr(value, each), tensors, numbers) for each in made[0])
        return ("object", kind, *parts)
    raise UnusableArgumentError(f"its argument '{name}' holds a {kind.__name__}")


def _leaves(layout: Any) -> Iterator[Any]:
    if layout in (_TENSOR, _NUMBER):
        yield layout
    elif isinstance(layout, tuple):
        for part in layout:
            yield from _leaves(part)


def _value(layout: Layout, tensors: Iterator[torch.Tensor], numbers: Iterator[torch.Tensor]) -> Any:
    if layout == _TENSOR:
        return next(tensors)
    if layout == _NUMBER:
        return next(numbers).shape[0]
    what, *parts = layout
    if what == "value":
        return parts[0].value
    if what == "dict":
        return {key: _value(part, tensors, numbers) for key, part in parts}
    kind, *items = parts
    values = [_value(part, tensors, numbers) for part in items]
    if what == "object":
        _, more = rebuild_spec(kind) or ((), {})
        return kind(*values, **more)
    return kind(values)
