"""Compile the diffusion model of a MODEL: the object patch, the sampling session, and the call itself."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from comfy.patcher_extension import CallbacksMP

from ...compile_cache.keys import Role
from ...compile_cache.regions import Hook, RegionRunner
from . import service
from .blocks import flux, unet
from .blocks.common import Bypass
from .delegate import static_clone
from .module_runner import ModuleRunner, announce_backend
from .session_log import SessionLog
from .signature import Description

_KEY = "resolute"
_FAMILIES = (unet, flux)


def compile_diffusion_model(model: Any, backend: str, node_id: str | None = None) -> Any:
    """A clone of `model` (a ModelPatcher) whose diffusion model runs through the cache. Compiles nothing yet.

    The hook is an object patch, innermost and restored by ComfyUI for each clone, so wrappers of other packs compose
    with it in either order. Raises UnknownBackendError or BackendUnavailableError.
    """
    announce_backend(backend, model.load_device.type, node_id)
    clone = static_clone(model)
    name = _hook_name(clone)
    inner = clone.get_model_object(name)
    if isinstance(inner, CompiledForward):  # compiled before: the last node decides
        inner = inner.inner
    forward = CompiledForward(clone.get_model_object("diffusion_model"), inner, backend, node_id)
    clone.add_object_patch(name, forward)
    moments = {
        CallbacksMP.ON_PRE_RUN: lambda *_: forward.begin(),
        CallbacksMP.ON_CLEANUP: lambda *_: forward.end(),
        CallbacksMP.ON_DETACH: lambda *_: forward.weights_left(),
    }
    for moment, callback in moments.items():
        clone.remove_callbacks_with_key(moment, _KEY)
        clone.add_callback_with_key(moment, _KEY, callback)
    return clone


def _hook_name(patcher: Any) -> str:
    """Most diffusion models of core split `forward` (wrappers) from `_forward` (the computation); some do not."""
    model = patcher.get_model_object("diffusion_model")
    return "diffusion_model._forward" if hasattr(model, "_forward") else "diffusion_model.forward"


class CompiledForward:
    """Stands in for `diffusion_model._forward`. Not a Module: it holds one and must not become its child."""

    def __init__(self, module: torch.nn.Module, inner: Any, backend: str, node_id: str | None) -> None:
        self.inner = inner
        self._module = module
        self._runner = ModuleRunner(module, backend, Role.UNET, self._hooks, node_id)
        self._log = SessionLog(self._runner)
        # Families order their arguments differently, and core calls by position.
        self._names = [
            name for name, kind in inspect.signature(inner).parameters.items() if kind.kind != kind.VAR_KEYWORD
        ]

    def _hooks(self, run: RegionRunner, bypass: Bypass) -> Sequence[Hook]:
        return [hook for family in _FAMILIES for hook in family.hooks(self._module, run, bypass)]

    def begin(self) -> None:
        """A sampling run starts, with the weights loaded."""
        service.cache().open_session(self._runner.owner)
        self._runner.residency.refresh(thorough=True)
        self._log.begin()

    def end(self) -> None:
        """The run is over, however it ended."""
        service.cache().close_session(self._runner.owner)
        self._log.end()

    def weights_left(self) -> None:
        """ComfyUI took the model down (unload, free memory, another clone's turn): stale captures go at once."""
        # Restoring an object patch leaves a bound method in the module's dictionary: a cycle that keeps it alive.
        for name in ("_forward", "forward"):
            if getattr(self._module.__dict__.get(name), "__self__", None) is self._module:
                del self._module.__dict__[name]
        self._runner.residency.refresh(thorough=True)
        service.cache().drop_stale(self._runner.owner, self._runner.residency.epoch)

    @torch.compiler.disable
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Same arguments as core's `_forward`: the latent, then whatever the model family takes."""
        given = {self._names[index]: value for index, value in enumerate(args)} | kwargs
        options = given.pop("transformer_options", None) or {}
        description = Description()
        builders = {
            name: description.take("latent" if name == self._names[0] else name, value) for name, value in given.items()
        }
        description.take_options(options)

        def invoke(tensors: Sequence[torch.Tensor]) -> Any:
            inputs = {name: build(tensors) for name, build in builders.items()}
            first = inputs.pop(self._names[0])
            return self.inner(first, **inputs, transformer_options=options)

        return self._runner.run(description, invoke)
