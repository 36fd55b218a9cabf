"""What stands where a module's forward stood, as an object patch of a model patcher."""

from __future__ import annotations

import inspect
import weakref
from abc import ABC, abstractmethod
from typing import Any

import torch

from ....compile_cache.regions.foreign_code import HOOKED, is_own, origin


class ForwardPatch(ABC):
    """Not a Module: it stands for one, and must not become its child or keep it alive: ComfyUI puts it into the module
    itself, and a model that only a garbage collection can free stays on the GPU until then.

    `inner` is the forward that it replaces: the module's own, or what another pack put there.
    """

    def __init__(self, module: torch.nn.Module, inner: Any) -> None:
        self._module = weakref.ref(module)
        own = inspect.ismethod(inner) and inner.__self__ is module
        self._own_method = inner.__func__ if own else None
        self._foreign = None if own else inner
        # torch's own: TAESD's decoder is a Sequential.
        self.is_known_code = own and origin(inner.__func__) in (origin(type(module)), "torch")

    @property
    def module(self) -> torch.nn.Module:
        """The module whose forward this is. It outlives every call."""
        module = self._module()
        assert module is not None, "called for a module that is gone"
        return module

    @property
    def inner(self) -> Any:
        """The forward that this one replaces."""
        return self._foreign if self._own_method is None else self._own_method.__get__(self.module)

    def for_copy(self, module: torch.nn.Module, own: Any) -> ForwardPatch:
        """The same for another copy of the model, on another device, whose own forward is `own`."""
        return self._around(module, own if self._foreign is None else self._foreign)

    @abstractmethod
    def _around(self, module: torch.nn.Module, inner: Any) -> ForwardPatch: ...

    def weights_detached(self, unpatched: bool) -> None:
        """ComfyUI took the model down: `unpatched`, all of it (unload, free memory), or only to take it up again."""
        # Restoring an object patch leaves a bound method in the module's dictionary: a cycle that keeps it alive. Where
        # another patch has exchanged the module meanwhile, it leaves us there.
        module = self._module()
        if module is None:
            return
        for name in HOOKED:
            found = module.__dict__.get(name)
            if found is self or is_own(module, name, found):
                del module.__dict__[name]

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


def without_our_patches(forward: Any) -> Any:
    """What stood there before Resolute: of two Compile nodes in a row, the last decides."""
    while isinstance(forward, ForwardPatch):
        forward = forward.inner
    return forward
