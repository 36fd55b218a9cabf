"""The operators of comfy-kitchen, which computes with ComfyUI's quantized weights, in traces and compiled code.

Most are registered with torch, and a trace contains them unchanged. Some functions dispatch through comfy-kitchen's own
kernel registry instead: a trace would record their implementation, and leave fake tensors in their caches, which breaks
all later calls. `opaque` gives traces an operator for each of these.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ....modules.slots import swapped
from ....torch_compat.operators import defined
from ....torch_compat.private_names import FakeTensor

NAMESPACE = "comfy_kitchen"  # the namespace of its operators, and the name of its package

# Operators that multiply by a weight's quantized numbers without dequantizing them first.
_PRODUCTS = frozenset(
    {
        "aten::_scaled_mm", "aten::_scaled_mm_v2", "aten::_int_mm",
        "comfy_kitchen::int8_linear", "comfy_kitchen::scaled_mm_nvfp4", "comfy_kitchen::scaled_mm_mxfp8",
        "resolute::convrot_w4a4_linear", "resolute::w4a8_int8_linear", "resolute::w4a8_packed_linear",
    }
)  # fmt: skip
_CODES = (torch.float32, torch.float16, torch.bfloat16)  # comfy-kitchen's numbers of dtypes


def opaque() -> AbstractContextManager[None]:
    """In this block, comfy-kitchen's registry returns a torch operator for calls with fake tensors."""
    registry = _registry()
    if registry is None:
        return nullcontext()
    original = registry.get_implementation

    def get_implementation(func_name: str, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        found: Callable[..., Any] = original(func_name, *args, **kwargs)
        operator = operators().get(func_name)
        if operator is None:
            return found

        def run(*given: Any, **named: Any) -> Any:
            of_trace = any(isinstance(each, FakeTensor) for each in (*given, *named.values()))
            return (operator if of_trace else found)(*given, **named)

        return run

    return swapped([(vars(registry), "get_implementation", get_implementation)])


def product_of(numbers: torch.fx.Node) -> str | None:
    """The operator that multiplies by a weight's quantized numbers, a graph input; None if they are dequantized first
    (the format is emulated).
    """
    waiting, seen = [numbers], {numbers}
    while waiting:
        for user in waiting.pop().users:
            if _name(user) in _PRODUCTS:
                return _name(user).partition("::")[2]
            if user not in seen and _is_view(user):
                seen.add(user)
                waiting.append(user)
    return None


def _registry() -> Any:
    return getattr(sys.modules.get(f"{NAMESPACE}.registry"), "registry", None)


@functools.cache
def operators() -> dict[str, Callable[..., Any]]:
    """The function to call in a trace, by name in comfy-kitchen's registry: our operators, and one of its own."""
    own = {
        name: defined(name, schema, functools.partial(_run, name), fake) for name, (schema, fake) in _DEFINED.items()
    }
    return {**own, "int8_linear": _int8_linear}


def _run(function: str, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Dispatch to the kernel for these arguments, as comfy-kitchen's own functions do."""
    names = [argument.name for argument in getattr(torch.ops.resolute, function).default._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    result: torch.Tensor = _registry().get_implementation(function, kwargs=given)(**given)
    return result.contiguous()


def _fake_product(x: Any, numbers: Any, *rest: Any) -> Any:
    return x.new_empty((*x.shape[:-1], numbers.shape[0]), dtype=_dtype(rest, x))


def _fake_w4a8(x: Any, numbers: Any, relative: Any, of_channels: Any, *rest: Any) -> Any:
    """The number of rows is that of `of_channels`, because packed numbers have no rows."""
    return x.new_empty((*x.shape[:-1], of_channels.shape[0]), dtype=_dtype(rest, x))


def _fake_weight(numbers: Any, *rest: Any) -> Any:
    """Each byte packs two 4-bit numbers, so the result has twice the columns."""
    return numbers.new_empty((numbers.shape[0], 2 * numbers.shape[1]), dtype=_dtype(rest, numbers))


def _dtype(arguments: Iterable[Any], like: Any) -> Any:
    return next((each for each in arguments if isinstance(each, torch.dtype)), like.dtype)


# comfy-kitchen added the last five arguments after 0.2.31.
_W4A8 = (
    "(Tensor x, Tensor qdata, Tensor s_rel, Tensor s_channel, Tensor? codebook=None, Tensor? correction=None, "
    "Tensor? bias=None, int group_size=16, int convrot_groupsize=256, ScalarType out_dtype=bfloat16, "
    "str? input_act=None, Tensor? input_act_weight=None, float input_act_eps=0.0, Tensor? residual=None, "
    "Tensor? residual_scale=None) -> Tensor"
)
# Functions of comfy-kitchen's registry without a torch operator: schema, and the fake implementation.
_DEFINED: dict[str, tuple[str, Callable[..., Any]]] = {
    "convrot_w4a4_linear": (
        "(Tensor x, Tensor qweight, Tensor wscales, Tensor? bias=None, int convrot_groupsize=256, "
        "int quant_group_size=64, str linear_dtype='int4') -> Tensor",
        _fake_product,
    ),
    "dequantize_convrot_w4a4_weight": (
        "(Tensor qdata, Tensor scales, int convrot_groupsize=256, int quant_group_size=64, "
        "ScalarType output_dtype=float) -> Tensor",
        _fake_weight,
    ),
    "w4a8_int8_linear": (_W4A8, _fake_w4a8),
    "w4a8_packed_linear": (_W4A8, _fake_w4a8),
    "fp16_linear": (
        "(Tensor x, Tensor weight, Tensor? bias=None, Tensor? residual=None, Tensor? residual_scale=None) -> Tensor",
        _fake_product,
    ),
    "dequantize_w4a8_int8_weight": (
        "(Tensor qdata, Tensor s_rel, Tensor s_channel, Tensor? codebook=None, Tensor? correction=None, "
        "int group_size=16, int convrot_groupsize=256, ScalarType output_dtype=bfloat16) -> Tensor",
        _fake_weight,
    ),
}


def _int8_linear(x: Any, weight: Any, weight_scale: Any, bias: Any = None, out_dtype: Any = None, **more: Any) -> Any:
    """Call comfy-kitchen's own torch operator, which takes a number instead of the dtype."""
    code = _CODES.index(x.dtype if out_dtype is None else out_dtype)
    return getattr(torch.ops, NAMESPACE).int8_linear(x, weight, weight_scale, bias, code, **more)


def _name(node: torch.fx.Node) -> str:
    """The name of a node's operator without its overload: "aten::mm"."""
    schema = getattr(node.target, "_schema", None)
    return "" if schema is None else str(schema.name)


_VIEWS: Iterable[str] = ("aten::clone", "aten::contiguous")


def _is_view(node: torch.fx.Node) -> bool:
    return bool(getattr(node.target, "is_view", False)) or _name(node) in _VIEWS
