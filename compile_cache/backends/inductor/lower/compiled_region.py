"""One compiled region: inductor's code for a trace, and the guards on the sizes for which it may run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch

from ....torch_compat.private_names import CachingAutotuner, CompiledFxGraph, pytree
from .shape_guards import ConfirmedSizes, ShapeGuards
from .tracing import Shapes

FlatCode = Callable[[list[torch.Tensor]], Sequence[Any]]
Choice = dict[str, Any]  # block sizes and numbers of warps and stages, under Triton's names


@dataclass(eq=False)
class CompiledRegion:
    """Runs on the weights of any module with the traced structure, at every size that its guards allow.

    code: inductor's function from one flat list (the used weights, then the inputs) to the flat outputs. It empties
        the list while it runs, so that each input is freed after its last use.
    static: the shape of each input, with 0 for named dimensions. A call must match the nonzero sizes exactly.
    used_weights: indices into `weight_inputs`: a part of a block needs only some of the block's weights.
    output_spec: the structure of the original's result.
    kernels: the Triton kernels by name; empty on the CPU.
    graph: the graph to store; None if the region returns its inputs, for which inductor returns a plain function.
    libraries: shared libraries that the code loads, by path in inductor's cache. Only on the CPU, only if compiled
        in this process: a CUDA graph contains its kernels.
    confirmed: sizes at which guards fail, but a comparison showed the results to be correct.
    quantized: see `Trace.quantized`.
    """

    code: FlatCode
    guards: ShapeGuards
    static: Shapes
    used_weights: tuple[int, ...]
    output_spec: pytree.TreeSpec
    kernels: Mapping[str, KernelByAddress] = field(default_factory=dict)
    graph: CompiledFxGraph | None = None
    libraries: Mapping[str, bytes] = field(default_factory=dict)
    confirmed: ConfirmedSizes = field(default_factory=ConfirmedSizes)
    quantized: tuple[tuple[str, str], ...] = ()

    @property
    def written(self) -> list[int]:
        """Indices of the inputs that the code mutates, as the original does. If the code would get a copy of such an
        input, the caller must run the original instead.
        """
        first = len(self.used_weights)
        return [index - first for index in self.graph.mutated_input_idxs] if self.graph is not None else []

    def __call__(
        self, weights: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], donated: Sequence[int] = ()
    ) -> Any:
        """Run on all weights of the block, in the order of `weight_inputs`, and its inputs in `region_format`.

        donated: indices of donated inputs, freed after their last use. If any, `tensors` must be a list; it is emptied.
        """
        inputs = [*[weights[index] for index in self.used_weights], *tensors]
        if donated:
            assert isinstance(tensors, list)
            tensors.clear()
        flat = self.code(inputs)
        return pytree.tree_unflatten(list(flat), self.output_spec)


class KernelByAddress:
    """Launches one of our Triton kernels with device addresses instead of tensors.

    A launch with tensors fails in a capture, see `cuda_graphs.foreign_launches`. Triton's launcher treats an integer as
    an address, without a query to the driver. Autotuning needs the tensors themselves, so kernels with several
    configurations still get them.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)

    @property
    def choice(self) -> Choice | None:
        """The configuration that autotuning chose; None before autotuning."""
        launchers = self._kernel.launchers
        return _choice(launchers[0]) if len(launchers) == 1 else None

    def choose(self, choice: Choice) -> None:
        """Use a configuration that autotuning chose before. Does nothing if the kernel has no such configuration."""
        matching = [launcher for launcher in self._kernel.launchers if _choice(launcher) == choice]
        if len(matching) == 1:
            self._kernel.launchers = matching

    def run(self, *args: Any, **kwargs: Any) -> Any:
        if len(self._kernel.launchers) == 1:
            args = tuple(arg.data_ptr() if isinstance(arg, torch.Tensor) else arg for arg in args)
        return self._kernel.run(*args, **kwargs)


def _choice(launcher: Any) -> Choice:
    config = launcher.config
    return {**config.kwargs, "num_warps": config.num_warps, "num_stages": config.num_stages}


def launch_by_address(modules: Iterable[ModuleType]) -> dict[str, KernelByAddress]:
    """Wrap the Triton kernels of generated modules, in place. Returns the kernels by name."""
    kernels: dict[str, KernelByAddress] = {}
    for module in modules:
        for name, value in list(vars(module).items()):
            if CachingAutotuner is not None and isinstance(value, CachingAutotuner):
                value = KernelByAddress(value)
                setattr(module, name, value)
            if isinstance(value, KernelByAddress):  # already wrapped: another region of this process shares the kernel
                kernels[name] = value
    return kernels
