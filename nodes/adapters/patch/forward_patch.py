"""Base class of the object patches that replace a module's forward."""

from __future__ import annotations

import copy
import functools
import inspect
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ....compile_cache.code_identity.attributes import HOOKED, is_own
from ..trust.core_code import is_known_forward

NOTHING = object()


class ForwardPatch(ABC):
    """Replaces the forward of one module.

    It is not a Module and references its module weakly: ComfyUI stores the patch in the module itself, and a reference
    cycle would keep an unloaded model on the GPU until the next garbage collection.
    """

    def __init__(self, module: torch.nn.Module, inner: Any) -> None:
        """inner: the forward to replace, the module's own or another pack's. A patch of ours is unwrapped: of two
        compile nodes in a row, the last one wins.
        """
        while isinstance(inner, ForwardPatch):
            inner = inner.inner
        self._module = weakref.ref(module)
        own = inspect.ismethod(inner) and inner.__self__ is module
        self._own_method = inner.__func__ if own else None
        self._foreign = None if own else inner
        self.is_known_code = is_known_forward(module, inner)
        self.displaced: Any = NOTHING  # another pack's attribute of the module that we replaced, see `patch_install`

    @property
    def module(self) -> torch.nn.Module:
        """The module whose forward is replaced. It is alive during every call."""
        module = self._module()
        assert module is not None, "the forward of a module that was garbage collected is called"
        return module

    @property
    def is_alive(self) -> bool:
        """True while the module exists: another pack may have replaced it with its own module."""
        return self._module() is not None

    @property
    def inner(self) -> Any:
        """The forward that this one replaces."""
        return self._foreign if self._own_method is None else self._own_method.__get__(self.module)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle the replaced forward in place of this patch: ComfyUI leaves the patch on the network, which
        every clone shares, until another clone is loaded, so a deep copy of the network reaches it.
        """
        return copy.copy, (self.inner,)

    def by_name(self, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a call by name, in their order."""
        unnamed = [f"args[{index}]" for index in range(len(self._names), len(args))]
        return dict(zip([*self._names, *unnamed], args, strict=False)) | kwargs

    @property
    def latent_name(self) -> str:
        """The name of the first argument, which is the latent in every role."""
        return self._names[0] if self._names else "args[0]"

    @functools.cached_property
    def _names(self) -> list[str]:
        return argument_names(self.module, self.inner)

    @functools.cached_property
    def takes_any_arguments(self) -> bool:
        """True if `inner` has `*args`. The names then come from another forward, and `inner` may read by position."""
        return _takes_any(inspect.signature(self.inner))

    def for_copy(self, module: torch.nn.Module, own: Any) -> ForwardPatch:
        """The same patch for a copy of the model on another device. own: the forward that the copy has now."""
        return self._rebuilt(module, own if self._foreign is None else self._foreign)

    @abstractmethod
    def _rebuilt(self, module: torch.nn.Module, inner: Any) -> ForwardPatch:
        """A patch with the same settings for another module."""

    def weights_detached(self, unpatched: bool) -> None:
        """ComfyUI detached the weights. unpatched: for good (unload, free memory), not only to load them again."""
        # Undoing an object patch leaves a bound method in the module's dictionary, a cycle that keeps the module alive.
        # If another object patch has replaced the module meanwhile, core leaves this patch itself there.
        module = self._module()
        if module is None:
            return
        for name in HOOKED:
            found = module.__dict__.get(name)
            if found is self or is_own(module, name, found):
                del module.__dict__[name]

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Same arguments and result as `inner`."""


def argument_names(module: torch.nn.Module, forward: Callable[..., Any]) -> list[str]:
    """A forward's argument names in order. Families order them differently, and core passes them by position.

    For a forward with `*args`, the names come from the first class of the module's MRO whose forward names its
    arguments. Empty if there is no such class.
    """
    name = "_forward" if hasattr(type(module), "_forward") else "forward"
    of_classes = (inspect.signature(vars(kind)[name]) for kind in type(module).__mro__ if name in vars(kind))
    signatures = [inspect.signature(forward), *(_without_self(each) for each in of_classes)]
    for signature in signatures:
        if not _takes_any(signature):
            return [each.name for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
    return []


def _without_self(signature: inspect.Signature) -> inspect.Signature:
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def _takes_any(signature: inspect.Signature) -> bool:
    return any(each.kind is each.VAR_POSITIONAL for each in signature.parameters.values())
