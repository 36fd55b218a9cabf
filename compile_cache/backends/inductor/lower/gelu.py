"""The tanh approximation of GELU: as an epilogue of the preceding matrix product, else with one exponential.

0.5 x (1 + tanh(u)) = x sigmoid(2 u), exactly. Over a transformer's hidden layer a tanh kernel is compute-bound. On
NVIDIA, cuBLAS applies the GELU to a linear layer's result before it writes that to memory.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, cast

import torch

from ....torch_compat.gpu import is_nvidia
from ....torch_compat.operators import defined
from ....torch_compat.private_names import addmm_activation, computation_dtype
from . import casts

_ATEN = torch.ops.aten
OPERATOR = _ATEN.gelu.default
_VIEWS = (_ATEN.view.default, _ATEN._unsafe_view.default)  # torch 2.15 traces a linear layer with the second
_HALVES = (torch.float16, torch.bfloat16)


def by_approximation(elsewhere: Callable[..., Any]) -> Callable[..., Any]:
    """The table's decomposition of GELU: `by_sigmoid` if approximate="tanh", else `elsewhere`, which is exact."""

    def gelu(x: torch.Tensor, approximate: str = "none") -> Any:
        return by_sigmoid(x) if approximate == "tanh" else elsewhere(x, approximate=approximate)

    return gelu


def by_sigmoid(x: torch.Tensor) -> torch.Tensor:
    exact = x.to(computation_dtype(x.dtype))
    doubled = 2 * math.sqrt(2 / math.pi) * (exact + 0.044715 * exact * exact * exact)
    return (exact * torch.sigmoid(doubled)).to(x.dtype)


def join_products(graph: torch.fx.Graph, device: torch.device) -> None:
    """Replace each half-precision linear layer and the GELU that is its result's only user by one operator."""
    if addmm_activation is None or not is_nvidia(device):
        return
    for node in list(graph.nodes):
        if (product := _product_before(node)) is None:
            continue
        with graph.inserting_before(product):
            made = graph.call_function(operator(), product.args)
        made.meta = dict(product.meta)
        product.replace_all_uses_with(made)
        graph.erase_node(product)
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)


@functools.cache
def operator() -> Callable[..., torch.Tensor]:
    """`torch.ops.resolute.addmm_gelu`. bias: (n). x: (tokens, k). weight: (k, n). Returns (tokens, n)."""
    schema = "(Tensor bias, Tensor x, Tensor weight) -> Tensor"
    return defined("addmm_gelu", schema, _run, lambda bias, x, weight: x.new_empty((x.shape[0], weight.shape[1])))


def _run(bias: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    if not x.is_cuda:  # on the CPU torch's operator computes the exact GELU
        return torch.nn.functional.gelu(torch.addmm(bias, x, weight), approximate="tanh")
    return cast(torch.Tensor, addmm_activation(bias, x, weight, use_gelu=True))


def _product_before(node: torch.fx.Node) -> torch.fx.Node | None:
    """If the node is a tanh GELU and the only user of a linear layer's result or of its view: that product's node."""
    if node.target is not OPERATOR or node.kwargs.get("approximate") != "tanh":
        return None
    found: Any = node.args[0]
    while found.target in _VIEWS and len(found.users) == 1:
        found = found.args[0]
    is_alone = found.target is _ATEN.addmm.default and len(found.users) == 1 and not found.kwargs
    return found if is_alone and _is_linear(*found.args) else None


def _is_linear(bias: Any, x: Any, weight: Any) -> bool:
    """True for a half-precision product with a weight input, cast or not. cuBLAS fuses no GELU if a side is 1."""
    own, values = weight, [each.meta["val"] for each in (bias, x, weight)]
    while own.target in (_ATEN.t.default, _ATEN._to_copy.default, casts.operator()):
        own = own.args[0]
    is_weight = weight.target is _ATEN.t.default and own.op == "placeholder"
    is_wide = all(isinstance(size, int) and size > 1 for size in values[2].shape)
    return is_weight and is_wide and values[0].ndim == 1 and all(each.dtype in _HALVES for each in values)
