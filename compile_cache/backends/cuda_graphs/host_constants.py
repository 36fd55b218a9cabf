"""Values that a forward makes on the host and copies to the GPU, such as `torch.arange(n).to(x)`.

Such a copy waits for the GPU, so it cannot be captured. Most transformers of ComfyUI make one: a frequency table,
positions, or a list of sizes in `torch.tensor(sizes, device=...)`. If a call computes the value from Python numbers
alone, every call of its signature computes the same value, just as it computes the same scalars. So we copy the value
to the GPU before the capture, and the capture reads a clone of that copy.

Two torch modes make the replacement, only in rehearsals and captures of forwards that need it. A host tensor is
constant if an operator of this call made it from constant tensors: not from the call's inputs, a weight, an option, a
random number or anything on the GPU. Only constant tensors are replaced. Each run looks them up among the copies by
content: a value that differs between two runs of a call has no copy, and the call is not captured.
"""

from __future__ import annotations

import contextlib
import hashlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ...code_identity.names import modules_of
from ...errors import CaptureError
from ...modules.slots import all_parts
from ...torch_compat.private_names import TorchDispatchMode, pytree
from .kept_tensors import clear_caches

# Most operators take a 0-dim host tensor as a scalar argument. These copy it to the device.
_COPY_SCALARS = frozenset(
    {"aten::copy_", "aten::index", "aten::index_put", "aten::index_put_", "aten::to", "aten::_to_copy"}
)
_LIFT = "aten::lift_fresh"  # the last step of `torch.tensor(numbers)`
_FROM_PYTHON = (torch.tensor, torch.as_tensor)

Key = tuple[Any, ...]


@dataclass
class Run:
    """One run with constants: the copies it used, values without a copy, and whether it copied other host tensors."""

    used: dict[int, torch.Tensor] = field(default_factory=dict)
    missing: list[tuple[torch.device, torch.Tensor]] = field(default_factory=list)
    has_foreign: bool = False


class HostConstants:
    """GPU copies of the values that the forward of one module makes on the host.

    Holds the copies weakly: a run or a graph keeps them alive. Not thread-safe: the cache's lock guards captures.
    """

    def __init__(self, module: torch.nn.Module | None) -> None:
        """module: each run first clears the `functools.cache` of functions in this module's code."""
        self._code = modules_of(all_parts(module)) if module is not None else set()
        self._copies: weakref.WeakValueDictionary[Key, torch.Tensor] = weakref.WeakValueDictionary()

    @contextlib.contextmanager
    def observed(
        self, inputs: Sequence[torch.Tensor], is_capturing: bool = False, makes: bool = False
    ) -> Iterator[Run]:
        """Replace constant host tensors by their copies, in this thread. inputs: the call's tensors.

        is_capturing: copies from the host are impossible, so a value without a copy becomes an empty tensor; a graph
        with such a value must not be launched. makes: copy values that have no copy yet.
        """
        clear_caches(self._code)
        run = Run()
        with _FromPython(), _Replacing(self, run, is_capturing, makes):
            yield run
        # `tolist` turns a host input into Python numbers unseen by the modes, so no value is known to be constant.
        run.has_foreign |= any(tensor.device.type == "cpu" for tensor in inputs)

    def add(self, missing: Sequence[tuple[torch.device, torch.Tensor]]) -> list[torch.Tensor]:
        """Copy host tensors to their devices. Returns the copies; the caller must keep them alive."""
        return [self._copied(device, value) for device, value in missing]

    def _copied(self, device: torch.device, value: torch.Tensor) -> torch.Tensor:
        copy = self._copies[_key(device, value)] = value.to(device)
        return copy

    def find(self, device: torch.device, value: torch.Tensor) -> torch.Tensor | None:
        return self._copies.get(_key(device, value))


def require_one_device(tensors: Sequence[torch.Tensor]) -> None:
    """Raises CaptureError if an input is not on the first input's device. Code can read a host input unseen (`item`,
    `tolist`, or as a kernel's scalar argument), and every replay would use the value from the capture.
    """
    device = tensors[0].device
    if (other := next((each.device for each in tensors if each.device != device), None)) is not None:
        raise CaptureError(f"the forward cannot be captured: it runs on {device}, and an input is on {other}")


def _key(device: torch.device, value: torch.Tensor) -> Key:
    content = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return (str(device), value.dtype, tuple(value.shape), value.stride(), hashlib.sha256(content.tobytes()).digest())


class _FromPython(TorchFunctionMode):
    """Splits `torch.tensor(numbers, device=...)` in two, because it copies inside one operator: tensor, then copy."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if func is torch.Tensor.new_tensor and len(args) == 2:
            like: torch.Tensor = args[0]
            given = {"dtype": like.dtype, "device": like.device, **{k: v for k, v in given.items() if v is not None}}
            func, args = torch.tensor, args[1:]
        device = given.get("device")
        if func not in _FROM_PYTHON or device is None or isinstance((*args, None)[0], torch.Tensor):
            return func(*args, **(kwargs or {}))
        return func(*args, **{**given, "device": "cpu"}).to(device)


class _Replacing(TorchDispatchMode):  # type: ignore[misc]
    def __init__(self, constants: HostConstants, run: Run, is_capturing: bool, makes: bool) -> None:
        super().__init__()
        self._constants, self._run, self._is_capturing, self._makes = constants, run, is_capturing, makes
        self._constant: dict[int, torch.Tensor] = {}  # by storage address; the value keeps the storage alive

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs or {}))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        on_host = [tensor for tensor in tensors if tensor.device.type == "cpu"]
        device = _device_of(leaves)
        if device is not None and on_host and not _writes_to_host(func, args, kwargs or {}):
            copies_scalars = func._schema.name in _COPY_SCALARS or len(on_host) == len(tensors)
            leaves = [self._replaced(leaf, device, copies_scalars) for leaf in leaves]
            args, kwargs = pytree.tree_unflatten(leaves, spec)
        result = func(*args, **(kwargs or {}))
        is_pure = len(on_host) == len(tensors) and all(map(self._is_constant, on_host))
        is_pure = is_pure and torch.Tag.nondeterministic_seeded not in func.tags
        self._note(func, result, on_host, is_pure or func._schema.name == _LIFT)
        return result

    def _note(self, func: Any, result: Any, on_host: Sequence[torch.Tensor], is_pure: bool) -> None:
        """Record which host tensors are constant after an operator. is_pure: its inputs were all constant."""
        if not is_pure and func._schema.is_mutable:
            for tensor in on_host:
                self._constant.pop(tensor.untyped_storage().data_ptr(), None)
        if not is_pure:
            return
        for leaf in pytree.tree_flatten(result)[0]:
            if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu" and leaf.layout is torch.strided:
                self._constant.setdefault(leaf.untyped_storage().data_ptr(), leaf)

    def _is_constant(self, tensor: torch.Tensor) -> bool:
        return type(tensor) is torch.Tensor and tensor.untyped_storage().data_ptr() in self._constant

    def _replaced(self, leaf: Any, device: torch.device, copies_scalars: bool) -> Any:
        """A clone of the copy, for a host tensor that an operator reads on `device`; any other value unchanged."""
        if not isinstance(leaf, torch.Tensor) or leaf.device.type != "cpu" or not (leaf.ndim or copies_scalars):
            return leaf
        copy = None
        if not self._is_constant(leaf):
            self._run.has_foreign = True
        else:
            copy = self._constants.find(device, leaf)
            if copy is None and self._makes:
                (copy,) = self._constants.add([(device, leaf)])
            elif copy is None:
                self._run.missing.append((device, leaf.clone()))
        if copy is None:
            return torch.empty(leaf.shape, dtype=leaf.dtype, device=device) if self._is_capturing else leaf
        self._run.used[id(copy)] = copy
        return copy.clone()  # the forward may write to it


def _writes_to_host(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    written = [
        args[place] if place < len(args) else kwargs.get(each.name)
        for place, each in enumerate(func._schema.arguments)
        if each.alias_info is not None and each.alias_info.is_write
    ]
    return any(isinstance(each, torch.Tensor) and each.device.type == "cpu" for each in written)


def _device_of(leaves: Sequence[Any]) -> torch.device | None:
    """The first non-CPU device among an operator's arguments; None without one."""
    for leaf in leaves:
        device = leaf.device if isinstance(leaf, torch.Tensor) else leaf
        if isinstance(device, torch.device) and device.type != "cpu":
            return device
    return None
