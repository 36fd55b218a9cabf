"""The function that stands where a module's forward stood: it describes the call and sends it through the cache."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...compile_cache.keys import Role
from ...compile_cache.regions import Hook, HookBuilder, RegionRunner
from . import service
from .blocks.common import Bypass
from .module_runner import ModuleRunner
from .session_log import SessionLog
from .signature import Description, argument_names

# Finds the hooks of a module: `hooks` of one of the files in `blocks`.
Family = Callable[[torch.nn.Module, RegionRunner, Bypass], list[Hook]]
Invoke = Callable[[Sequence[torch.Tensor]], Any]


class CompiledForward:
    """Not a Module: it stands for one, and must not become its child or keep it alive: ComfyUI puts it into the module
    itself, and a model that only a garbage collection can free stays on the GPU until then.

    `inner` is the forward that it replaces: the module's own, or what another pack put there. The first argument of
    `inner` is the latent; whatever else it takes is described by name.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        inner: Any,
        backend: str,
        role: Role,
        families: Sequence[Family],
        node_id: str | None,
    ) -> None:
        self._module = weakref.ref(module)
        own = inspect.ismethod(inner) and inner.__self__ is module
        self._own_method = inner.__func__ if own else None
        self._foreign = None if own else inner
        # torch's own: TAESD's decoder is a Sequential.
        self._known_code = own and _package(inner.__func__) in (_package(type(module)), "torch")
        self.runner = ModuleRunner(module, backend, role, _hook_builder(module, families), node_id)
        self._made_with = (backend, role, families, node_id)
        self._log = SessionLog(self.runner)
        # A decode is one call, with no sampling run around it that would look at the module first.
        self._looks_always = role is Role.VAE_DECODE
        self._look = True
        self._names = argument_names(module, inner)

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

    def for_module(self, module: torch.nn.Module, own: Any) -> CompiledForward:
        """The same for another copy of the model, on another device, whose own forward is `own`."""
        return CompiledForward(module, own if self._foreign is None else self._foreign, *self._made_with)

    # --- moments in the life of the patcher, see `hooking` -----------------------------------------------------

    def begin(self) -> None:
        """A sampling run starts, with the weights loaded."""
        service.cache().open_session(self.runner.owner)
        self.runner.residency.refresh(thorough=True)
        self._log.begin()

    def end(self) -> None:
        """The run is over, however it ended."""
        service.cache().close_session(self.runner.owner)
        self._log.end()

    def weights_loaded(self) -> None:
        """ComfyUI loaded the model, or more of it: look at it closely before the next call."""
        self._look = True

    def weights_left(self) -> None:
        """ComfyUI took the model down (unload, free memory, another clone's turn): stale captures go at once."""
        # Restoring an object patch leaves a bound method in the module's dictionary: a cycle that keeps it alive.
        module = self._module()
        if module is None:
            return
        for name in ("_forward", "forward"):
            if getattr(module.__dict__.get(name), "__self__", None) is module:
                del module.__dict__[name]
        self.runner.residency.refresh(thorough=True)
        service.cache().drop_stale(self.runner.owner, self.runner.residency.epoch)

    # --- the call ----------------------------------------------------------------------------------------------

    @torch.compiler.disable
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Same arguments as `inner`."""
        description, invoke = self.describe(args, kwargs)
        thorough, self._look = self._look or self._looks_always, False
        return self.runner.run(description, invoke, thorough)

    def describe(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Description, Invoke]:
        """The tensors and plain values of a call, and how to call `inner` with other tensors in their place."""
        given = {self._names[index]: value for index, value in enumerate(args)} | kwargs
        options = given.pop("transformer_options", None)
        latent = self._names[0]
        description = Description()
        # The latent's shape is what people know a graph by: it comes first however the call was written.
        first = description.take("latent", given.pop(latent))
        others = {name: description.take(name, value) for name, value in given.items()}
        passed_on: dict[str, Any] = {}
        if not self._known_code:  # it may count steps, or decide by what it saw before
            description.block("another pack put a forward of its own into the model")
        if options is not None:
            description.take_options(options)
            passed_on["transformer_options"] = options

        def invoke(tensors: Sequence[torch.Tensor]) -> Any:
            return self.inner(first(tensors), **{name: build(tensors) for name, build in others.items()}, **passed_on)

        return description, invoke


def _package(code: Any) -> str:
    """ComfyUI, or the pack, that a function or a class comes from."""
    return str(code.__module__).partition(".")[0]


def unwrapped(forward: Any) -> Any:
    """What stood there before Resolute: of two Compile nodes in a row, the last decides."""
    return forward.inner if isinstance(forward, CompiledForward) else forward


def _hook_builder(module: torch.nn.Module, families: Sequence[Family]) -> HookBuilder:
    alive = weakref.ref(module)  # the program that keeps this function belongs to the module, and must not keep it

    def build(run: RegionRunner, bypass: Bypass) -> list[Hook]:
        root = alive()
        return [] if root is None else [hook for family in families for hook in family(root, run, bypass)]

    return build
