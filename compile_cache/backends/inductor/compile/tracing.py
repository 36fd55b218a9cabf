"""Turn a block of a model into an ATen graph whose chosen dimensions are symbols.

The graph is made by `make_fx` over fake tensors, not by Dynamo. Dynamo guards every attribute that it meets and
recompiles when one moves; here the caller names the inputs and their dynamic dimensions, weights become inputs of the
graph, and every assumption that tracing had to make comes back as an explicit list (`Trace.assumptions`). One graph
then serves every module of the same structure, in inference mode and in no_grad alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
import torch.fx.experimental._config as symbolic_shape_config
import torch.utils._pytree as pytree
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.nn.utils import stateless

from ....regions.region import Dims, RegionFunction
from ....regions.structure import parts

# Where a weight lives: its module's dictionary of parameters or buffers, and its name there.
WeightSlot = tuple[dict[str, Any], str]


@dataclass(frozen=True, eq=False)
class Trace:
    """An ATen graph over `weights + inputs`, with the symbols and the assumptions behind it."""

    graph: torch.fx.GraphModule
    fakes: Sequence[torch.Tensor]
    used_weights: tuple[int, ...]  # which of `weight_slots` the graph takes: a part of a block needs a part of them
    fake_mode: FakeTensorMode
    shape_env: ShapeEnv
    symbols: dict[str, sympy.Symbol]
    output_spec: pytree.TreeSpec
    oblivious: bool

    @property
    def assumptions(self) -> list[sympy.Basic]:
        """What has to hold for the symbols. Lowering adds to it, so read it after compiling."""
        return [guard.expr for guard in self.shape_env.guards]


def bind_dims(dims: Sequence[Dims], shapes: Sequence[Sequence[int]]) -> dict[str, int] | None:
    """Sizes of the named dimensions, or None where ranks differ or one name would need two sizes."""
    sizes: dict[str, int] = {}
    for names, shape in zip(dims, shapes, strict=True):
        if len(names) != len(shape):
            return None
        for name, size in zip(names, shape, strict=True):
            if name is not None and sizes.setdefault(name, size) != size:
                return None
    return sizes


def weight_slots(module: torch.nn.Module, without: Sequence[str] = ()) -> list[WeightSlot]:
    """Where the weights of `module` live, each once, in the order in which a trace takes them.

    Reading the slots again before each call, instead of keeping tensors, is what makes a rebound Parameter (a LoRA,
    an unload) take effect at once. `without`: children whose weights are left out.
    """
    return list(_named_slots(module, without).values())


def _named_slots(module: torch.nn.Module, without: Sequence[str]) -> dict[str, WeightSlot]:
    slots: dict[str, WeightSlot] = {}
    for member in ("_parameters", "_buffers"):
        seen: set[int] = set()
        for path, part in parts(module, without):
            own = getattr(part, member)
            for name, tensor in own.items():
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    slots[f"{path}.{name}" if path else name] = (own, name)
    return slots


def trace(
    function: RegionFunction,
    module: torch.nn.Module,
    inputs: Sequence[torch.Tensor],
    dims: Sequence[Dims],
    hints: Mapping[str, int],
    oblivious: bool = True,
    without: Sequence[str] = (),
) -> Trace:
    """Trace `function(module, *inputs)` with `dims` symbolic and every input in its `region_format`.

    `hints` are the sizes that heuristics may look at; they are not part of the result. `oblivious`: see
    `size_one_is_general`. `without`: children of `module` that `function` does not run. Raises whatever the traced
    code raises, and torch's own errors where a symbol would have to be read as a number.
    """
    # No duck shaping: two dimensions that happen to be equal in the example stay two symbols.
    shape_env = ShapeEnv(specialize_zero_one=False, duck_shape=False)
    fake_mode = FakeTensorMode(shape_env=shape_env)
    sizes = {
        name: shape_env.create_unspecified_symint_and_symbol(hint, ConstantSource(f"dim_{name}"), DimDynamic.DYNAMIC)
        for name, hint in hints.items()
    }
    # Before tracing: an equality that it finds replaces one symbol by others.
    symbols = {name: size.node.expr for name, size in sizes.items()}
    weights = {name: own[key] for name, (own, key) in _named_slots(module, without).items()}
    fakes: list[Any] = [fake_mode.from_tensor(weight.detach(), static_shapes=True) for weight in weights.values()]
    with fake_mode:
        fakes += [_symbolic_like(tensor, names, sizes) for tensor, names in zip(inputs, dims, strict=True)]
    output_specs: list[pytree.TreeSpec] = []

    def flat(*tensors: torch.Tensor) -> list[Any]:
        own = dict(zip(weights, tensors[: len(weights)], strict=True))
        with stateless._reparametrize_module(module, own, tie_weights=True):
            leaves, spec = pytree.tree_flatten(function(module, *tensors[len(weights) :]))
        output_specs.append(spec)
        return leaves

    # Its cache is for many traces of equal sizes: symbols of one trace are of no use to the next, and what to keep of
    # each result takes longer than to work it out.
    fake_mode.cache_enabled = False
    with fake_mode, torch.no_grad(), size_one_is_general(oblivious):
        traced = make_fx(flat, tracing_mode="symbolic")(*fakes)
    _refuse_writes_to_inputs(traced.graph)
    traced.graph.eliminate_dead_code()
    used = _drop_unused_weights(traced.graph, len(weights))
    # A fresh module: make_fx hangs its ShapeEnv on the graph, which inductor's disk cache then cannot pickle.
    graph = torch.fx.GraphModule(torch.nn.Module(), traced.graph)
    fakes = [fakes[index] for index in used] + fakes[len(weights) :]
    return Trace(graph, fakes, used, fake_mode, shape_env, symbols, output_specs[-1], oblivious)


def size_one_is_general(wanted: bool) -> AbstractContextManager[None]:
    """Whether a dynamic dimension counts as general even where the example's size is 1.

    It makes tracing leave out the question "is it 1?", at the price of operations that inductor cannot lower (slices
    by symbols). Without it the question becomes an assumption, which a comparison can settle.
    """
    patched: AbstractContextManager[None] = symbolic_shape_config.patch(backed_size_oblivious=wanted)  # type: ignore[attr-defined]
    return patched


def region_format(tensor: torch.Tensor) -> torch.memory_format:
    """The one memory layout that regions take: channels-last feature maps on CUDA, where convolutions want it and
    tokens are a view of it; contiguous for everything else."""
    return torch.channels_last if tensor.ndim == 4 and tensor.is_cuda else torch.contiguous_format


def _refuse_writes_to_inputs(graph: torch.fx.Graph) -> None:
    """A region may be handed a copy of its input in another layout; what it wrote there would be lost."""
    for node in graph.nodes:
        if not isinstance(node.target, torch._ops.OpOverload) or not node.target._schema.is_mutable:
            continue
        written = node.args[0]
        while isinstance(written.target, torch._ops.OpOverload) and written.target.is_view:
            written = written.args[0]
        if written.op == "placeholder":
            raise ValueError(f"it writes into its input ({node.target})")


def _drop_unused_weights(graph: torch.fx.Graph, weights: int) -> tuple[int, ...]:
    placeholders = [node for node in graph.nodes if node.op == "placeholder"][:weights]
    used = tuple(index for index, node in enumerate(placeholders) if node.users)
    for node in placeholders:
        if not node.users:
            graph.erase_node(node)
    return used


def _symbolic_like(tensor: torch.Tensor, names: Dims, sizes: Mapping[str, Any]) -> torch.Tensor:
    shape = [size if name is None else sizes[name] for name, size in zip(names, tensor.shape, strict=True)]
    return torch.empty(shape, dtype=tensor.dtype, device=tensor.device, memory_format=region_format(tensor))
