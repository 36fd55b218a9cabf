"""Noise levels on the GPU that know their values on the host too.

Most of core's samplers ask in each step whether the next noise level is 0. Asking a tensor on the GPU waits until the
GPU has done everything before. The values are known on the host before the run, and so is all that a sampler computes
from them exactly.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

_T = torch.Tensor
# What makes a number of Python's, or a tensor on the host.
_READS = frozenset({_T.item, _T.tolist, _T.cpu, _T.__bool__, _T.__float__, _T.__int__})
# Exact on both: moving numbers, comparing them, and what IEEE 754 rounds the same everywhere. Not the division by a
# number of Python's: the GPU multiplies with its reciprocal.
_NAMES = (
    "__getitem__", "clone", "detach", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "eq", "ne", "lt",
    "le", "gt", "ge", "add", "__add__", "__radd__", "sub", "__sub__", "__rsub__", "mul", "__mul__", "__rmul__", "div",
    "__truediv__", "__rtruediv__", "__pow__", "sqrt", "neg", "__neg__", "abs",
)  # fmt: skip
_EXACT = frozenset(getattr(_T, name) for name in _NAMES)
_DIVISIONS = frozenset({_T.div, _T.__truediv__})
_EXPONENTS = (2, 0.5)  # of others the GPU computes an approximation
_WRITES = frozenset({_T.__setitem__, _T.__iadd__, _T.__isub__, _T.__imul__, _T.__itruediv__})


class HostValues(torch.Tensor):
    """A tensor with a copy of its numbers on the host, which answers `bool`, `float`, `item` and their like.

    Results of exact operations among such tensors have copies too; all others are plain tensors. After something was
    written into one, or into an index of it, neither has a copy any more. What is written through another view, such as
    one of `view` or `unbind`, is not seen: core's samplers write nothing so.
    """

    _plain: torch.Tensor  # the same memory
    _host: torch.Tensor
    _is_valid: list[bool]  # shared by the views of one memory

    @staticmethod
    def of(tensor: torch.Tensor) -> torch.Tensor:
        """Waits for the GPU, once."""
        return _made(tensor, tensor.detach().to("cpu", copy=True), [True])

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        own = [each for each in _leaves((args, kwargs)) if isinstance(each, HostValues)]
        known = all(each._is_valid[0] for each in own)
        if func in _READS and known and len(args) == 1 and not kwargs:
            return read(func, args[0]._host)
        result = func(*_replaced(args, _plain), **_replaced(kwargs, _plain))
        if func in _WRITES or (func.__name__.endswith("_") and not func.__name__.endswith("__")) or "out" in kwargs:
            for each in own:
                each._is_valid[0] = False
        elif known and isinstance(result, torch.Tensor) and _is_exact(func, args, kwargs):
            is_view = func in (_T.__getitem__, _T.detach)
            return _made(result, func(*_replaced(args, _host)), args[0]._is_valid if is_view else [True])
        return result


def read(func: Callable[..., Any], host: torch.Tensor) -> Any:
    """Answer from the host. What it returns shares no memory with the copy."""
    result = func(host)
    return result.clone() if isinstance(result, torch.Tensor) else result


def _is_exact(func: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    if func not in _EXACT or kwargs:
        return False
    if func is _T.__pow__ and not (isinstance(args[1], (int, float)) and args[1] in _EXPONENTS):
        return False
    if func in _DIVISIONS and not isinstance(args[1], torch.Tensor):
        return False
    return all(isinstance(each, HostValues) for each in _leaves(args) if isinstance(each, torch.Tensor))


def _made(tensor: torch.Tensor, host: torch.Tensor, is_valid: list[bool]) -> torch.Tensor:
    made = tensor.as_subclass(HostValues)
    made._plain, made._host, made._is_valid = tensor, host, is_valid
    return made


def _plain(value: Any) -> Any:
    return value._plain if isinstance(value, HostValues) else value


def _host(value: Any) -> Any:
    return value._host if isinstance(value, HostValues) else value


def _leaves(values: Any) -> Iterator[Any]:
    if isinstance(values, (tuple, list)):
        for each in values:
            yield from _leaves(each)
    elif isinstance(values, dict):
        yield from _leaves(list(values.values()))
    else:
        yield values


def _replaced(values: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(values, (tuple, list)):
        return type(values)(map(functools.partial(_replaced, change=change), values))
    if isinstance(values, dict):
        return {name: _replaced(value, change) for name, value in values.items()}
    return change(values)
