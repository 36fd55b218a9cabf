"""Trace a block of a model to an ATen graph whose named dimensions are symbols.

`make_fx` (torch.fx.experimental.proxy_tensor) traces over fake tensors; Dynamo is not used. Dynamo guards every
attribute that it reads and recompiles when one changes. Here the caller names the inputs and their dynamic dimensions,
weights become graph inputs, and tracing returns its guards on sizes as a list (`Trace.guards`). So one graph serves
every module of the same structure, in inference mode and under no_grad.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch

from ....modules.region_weights import weight_inputs, weight_layouts, weight_slots, weights_from_inputs
from ....modules.site import Dims, RegionFunction
from ....torch_compat.private_names import (
    ConstantSource,
    DimDynamic,
    FakeTensorMode,
    ShapeEnv,
    pytree,
    symbolic_shape_config,
)
from . import casts, checks, gelu, kitchen, nearest, norms, one_thread, padding, quantizers
from .own_branches import AskedShapeEnv, InOperators

# The names that mark an input as a feature map, see `region_format`. A map of another size has "h of carried", say.
FEATURE_MAP: Dims = ("b", None, "h", "w")
_MAP_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}  # by rank

Shapes = tuple[tuple[int, ...], ...]

# On the CPU the meta kernel of a convolution branches on batch == 1 and on batch < 16. With a hint above both, the
# symbol gets no upper bound.
_CPU_BATCH_HINT = 17
_LARGEST = 1 << 31  # upper bound of a dimension; with one less, kernels could always index in 32 bits


@dataclass(frozen=True, eq=False)
class Trace:
    """An ATen graph whose inputs are the used weights and then the block's inputs, with its symbols and their guards.

    fakes: a fake tensor for each graph input.
    static: the shape of each block input, with 0 for named dimensions.
    used_weights: indices into `weight_inputs`: a part of a block needs only some of the block's weights.
    symbols: by dimension name.
    output_spec: the structure of the function's result; the graph returns the leaves.
    oblivious: the setting of `size_one_is_general` while tracing. Lowering must run under the same setting.
    branches: True if the block's own code branched on a size, see `ShapeGuards`.
    quantized: layouts of quantized weights, each with the operator that multiplies the stored numbers; the operator is
        empty if the weight is dequantized first.
    """

    graph: torch.fx.GraphModule
    fakes: Sequence[torch.Tensor]
    static: Shapes
    used_weights: tuple[int, ...]
    fake_mode: FakeTensorMode
    shape_env: ShapeEnv
    symbols: dict[str, sympy.Symbol]
    output_spec: pytree.TreeSpec
    oblivious: bool
    branches: bool = True
    quantized: tuple[tuple[str, str], ...] = ()

    @property
    def guards(self) -> list[sympy.Basic]:
        """Expressions over the symbols that must be true. Lowering adds guards, so read the list after compiling."""
        return [guard.expr for guard in self.shape_env.guards]


def bind_dims(dims: Sequence[Dims], shapes: Sequence[Sequence[int]]) -> dict[str, int] | None:
    """The sizes of the named dimensions; None if a rank differs or one name has two different sizes."""
    sizes: dict[str, int] = {}
    for names, shape in zip(dims, shapes, strict=True):
        if len(names) != len(shape):
            return None
        for name, size in zip(names, shape, strict=True):
            if name is not None and sizes.setdefault(name, size) != size:
                return None
    return sizes


def static_sizes(dims: Sequence[Dims], shapes: Sequence[Sequence[int]]) -> Shapes:
    """The shapes, with 0 for named dimensions."""
    return tuple(
        tuple(size if name is None else 0 for name, size in zip(names, shape, strict=True))
        for names, shape in zip(dims, shapes, strict=True)
    )


def general_hints(sizes: Mapping[str, int], device: torch.device) -> dict[str, int]:
    """Sizes to trace at, by dimension name, chosen so that the code stays general.

    Never 1, which torch and inductor specialize; on the CPU, batch "b" is at least _CPU_BATCH_HINT.
    "b0", "b1" and so on name the first dimensions of inputs that contain the batch once or twice (a part for the
    picture, a part for its reference): a batch of one is doubled in all of them.
    """
    lowest = {"b": _CPU_BATCH_HINT} if device.type == "cpu" else {}
    doubled = {name for name, size in sizes.items() if sizes.get("b0") == 1 and name.startswith("b") and size <= 2}
    return {name: max(2 * size if name in doubled else size, lowest.get(name, 2)) for name, size in sizes.items()}


@functools.cache
def import_all() -> None:
    """Trace a small module, once: a process's first trace imports much. The next trace repeats any error."""
    module = torch.nn.Sequential(torch.nn.GroupNorm(1, 2), torch.nn.Conv2d(2, 2, 1))
    with torch.no_grad(), contextlib.suppress(Exception):
        trace(
            lambda given, x: given(x),
            module,
            [torch.zeros(1, 2, 4, 4)],
            [("batch", None, "h", "w")],
            {"batch": 1, "h": 4, "w": 4},
        )


def trace(
    function: RegionFunction,
    module: torch.nn.Module,
    inputs: Sequence[torch.Tensor],
    dims: Sequence[Dims],
    hints: Mapping[str, int],
    oblivious: bool = True,
    without: Sequence[str] = (),
    attends: bool = True,
    yield_point: Callable[[], None] | None = None,
) -> Trace:
    """Trace `function(module, *inputs)` with the named `dims` as symbols and every input in its `region_format`.

    inputs: one tensor for each entry of `dims`; only shape, dtype and device count, so expanded placeholders suffice.
        A weight on the device "meta" is traced as if it were on the inputs' device.
    hints: the example size of each named dimension. The graph depends on it only through guards.
    oblivious: see `size_one_is_general`.
    without: children of `module` that `function` does not run.
    attends: see `RegionSite`.
    yield_point: called before each torch function that the block calls. It may wait, so that a trace yields to calls.

    Raises ValueError if the function writes into an input (`checks.refuse_writes_to_inputs`) or computes attention
    despite `attends=False`; the traced code's own errors; and torch's errors (GuardOnDataDependentSymNode, for example)
    if the code needs a value that tracing does not have.
    """
    # No duck shaping: two dimensions that happen to be equal in the example stay two symbols.
    shape_env = AskedShapeEnv(specialize_zero_one=False, duck_shape=False)
    fake_mode = FakeTensorMode(shape_env=shape_env)
    sizes = {name: _positive_size(shape_env, name, hint) for name, hint in hints.items()}
    # Read before tracing, because an equality guard replaces a symbol by others.
    symbols = {name: size.node.expr for name, size in sizes.items()}
    slots = weight_slots(module, without)
    weights, layouts = weight_inputs(slots), weight_layouts(slots)
    fakes: list[Any] = [_fake_weight(fake_mode, weight.detach(), inputs[0].device) for weight in weights]
    with fake_mode:
        fakes += [_symbolic_like(tensor, names, sizes) for tensor, names in zip(inputs, dims, strict=True)]
    output_specs: list[pytree.TreeSpec] = []
    has_maps = any(_is_map(names) for names in dims)

    def flat(*tensors: torch.Tensor) -> list[Any]:
        given = weights_from_inputs(module, without, tensors[: len(weights)])
        with given, nearest.ByIndex(), InOperators(shape_env, yield_point):
            leaves, spec = pytree.tree_flatten(function(module, *tensors[len(weights) :]))
        output_specs.append(spec)
        return [_as_map(leaf) for leaf in leaves] if has_maps else list(leaves)

    # The cache is for traces that share sizes. Each of our traces creates new symbols, so a lookup never hits, and
    # writing an entry takes longer than computing the result.
    fake_mode.cache_enabled = False
    with (
        fake_mode,
        torch.no_grad(),
        size_one_is_general(oblivious),
        kitchen.opaque(),
        padding.force_padding(),
        norms.fast_fake_norms(),
    ):
        traced = one_thread.graph_of(flat, fakes)
    checks.refuse_writes_to_inputs(traced.graph)
    if not attends:
        checks.refuse_attention(traced.graph)
    casts.keep_opaque(traced.graph, inputs[0].device)
    gelu.join_products(traced.graph, inputs[0].device)
    quantizers.share_scales(traced.graph)
    traced.graph.eliminate_dead_code()
    quantized = checks.quantized_weights(traced.graph, layouts)
    used = checks.drop_unused_weights(traced.graph, len(weights))
    # A new module: make_fx attaches its ShapeEnv to the graph, which inductor's disk cache then cannot pickle.
    graph = torch.fx.GraphModule(torch.nn.Module(), traced.graph)
    fakes = [fakes[index] for index in used] + fakes[len(weights) :]
    static = static_sizes(dims, [tensor.shape for tensor in inputs])
    about = (output_specs[-1], oblivious, shape_env.asked, quantized)
    return Trace(graph, fakes, static, used, fake_mode, shape_env, symbols, *about)


def _positive_size(shape_env: ShapeEnv, name: str, hint: int) -> Any:
    """A symbolic size between 1 (see `ShapeGuards`) and `_LARGEST`.

    Torch's default symbols may be 0. A contiguous stride is then a product of `Max(1, size)` terms, and kernels divide
    by it for every element instead of reading memory in order. Without an upper bound, inductor cannot tell that
    `x[:, n:]` ends with x (the end is sys.maxsize), and fails to lower graphs under `size_one_is_general`.
    """
    source = ConstantSource(f"dim_{name}")
    symbol = shape_env.create_symbol(hint, source, DimDynamic.DYNAMIC, positive=True, do_not_specialize_zero_one=True)
    shape_env.constrain_symbol_range(symbol, 1, _LARGEST)
    return shape_env.create_symintnode(symbol, hint=hint, source=source)


def size_one_is_general(wanted: bool) -> AbstractContextManager[None]:
    """Set whether torch treats a dynamic dimension as larger than 1 at any example size (`backed_size_oblivious`).

    If True, tracing never branches on "size == 1", but torch cannot lower some operations. If False, such a branch adds
    a guard, and at sizes that fail the guard the results are compared.
    """
    patched: AbstractContextManager[None] = symbolic_shape_config.patch(backed_size_oblivious=wanted)
    return patched


def region_format(tensor: torch.Tensor, dims: Dims = FEATURE_MAP) -> torch.memory_format:
    """The memory format in which regions expect a tensor.

    Channels-last for maps (batch, channels, height, width) and (batch, channels, frames, height, width) on CUDA:
    convolutions are fastest with it, and tokens and single frames are views of it. Contiguous for all other tensors,
    also those with four or five dimensions (rotary tables, masks).
    """
    is_map = tensor.is_cuda and _is_map(dims)
    return _MAP_FORMATS.get(tensor.ndim, torch.contiguous_format) if is_map else torch.contiguous_format


def in_region_format(tensor: torch.Tensor, dims: Dims) -> torch.Tensor:
    """The tensor in its `region_format`: itself, a view of it, or a copy."""
    memory_format = region_format(tensor, dims)
    given = tensor.contiguous(memory_format=memory_format)
    if memory_format is not torch.channels_last_3d:
        return given
    # A dimension of size 1 may have any stride, from which a convolution would infer another format.
    _, channels, frames, height, width = given.shape
    row, frame = width * channels, height * width * channels
    strides = (frames * frame, 1, frame, row, channels)
    return given if given.stride() == strides else given.as_strided(given.shape, strides)


def _is_map(dims: Dims) -> bool:
    return tuple((name or "").partition(" of ")[0] for name in dims[-2:]) == FEATURE_MAP[-2:]


def _as_map(result: Any) -> Any:
    """Convert a result of a region over feature maps to the format that the next region expects."""
    if not isinstance(result, torch.Tensor):
        return result
    wanted = region_format(result)
    return result if wanted is torch.contiguous_format else result.contiguous(memory_format=wanted)


def _fake_weight(fake_mode: FakeTensorMode, weight: torch.Tensor, device: torch.device) -> torch.Tensor:
    if weight.is_meta:
        with fake_mode:
            return torch.empty_strided(weight.shape, weight.stride(), dtype=weight.dtype, device=device)
    fake: torch.Tensor = fake_mode.from_tensor(weight, static_shapes=True)
    return fake


def _symbolic_like(tensor: torch.Tensor, names: Dims, sizes: Mapping[str, Any]) -> torch.Tensor:
    shape = [size if name is None else sizes[name] for name, size in zip(names, tensor.shape, strict=True)]
    return torch.empty(shape, dtype=tensor.dtype, device=tensor.device, memory_format=region_format(tensor, names))
