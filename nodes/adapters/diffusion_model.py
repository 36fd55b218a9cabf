"""Compile the diffusion model of a MODEL: the object patch, the sampling session, and the call itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from comfy.patcher_extension import CallbacksMP

from ...compile_cache.backends import registry
from ...compile_cache.keys import Role
from ...compile_cache.regions import Hook, RegionRunner
from . import service
from .blocks import unet
from .blocks.common import Bypass
from .delegate import static_clone
from .module_runner import ModuleRunner
from .session_log import SessionLog
from .signature import Description

_KEY = "resolute"
_FAMILIES = (unet,)


def compile_diffusion_model(model: Any, backend: str, node_id: str | None = None) -> Any:
    """A clone of `model` (a ModelPatcher) whose diffusion model runs through the cache. Compiles nothing yet.

    The hook is an object patch, innermost and restored by ComfyUI for each clone, so wrappers of other packs compose
    with it in either order. Raises UnknownBackendError or BackendUnavailableError.
    """
    registry.resolve(backend, model.load_device.type)
    clone = static_clone(model)
    name = _hook_name(clone)
    inner = clone.get_model_object(name)
    if isinstance(inner, CompiledForward):  # compiled before: the last node decides
        inner = inner.inner
    forward = CompiledForward(clone.get_model_object("diffusion_model"), inner, backend, node_id)
    clone.add_object_patch(name, forward)
    clone.remove_callbacks_with_key(CallbacksMP.ON_PRE_RUN, _KEY)
    clone.remove_callbacks_with_key(CallbacksMP.ON_CLEANUP, _KEY)
    clone.add_callback_with_key(CallbacksMP.ON_PRE_RUN, _KEY, lambda _: forward.begin())
    clone.add_callback_with_key(CallbacksMP.ON_CLEANUP, _KEY, lambda _: forward.end())
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
        # Restoring an object patch leaves a bound method in the module's dictionary: a cycle that keeps it alive.
        own = self._module.__dict__.get("_forward")
        if own is not self and getattr(own, "__self__", None) is self._module:
            del self._module.__dict__["_forward"]
        self._log.end()

    @torch.compiler.disable
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Same arguments as core's `_forward(x, timesteps, context, y, control, transformer_options, **kwargs)`."""
        names = ("latent", "timesteps", "context", "y", "control", "transformer_options")
        options = kwargs.get("transformer_options", args[5] if len(args) > 5 else {})
        description = Description()
        positional = [
            _fixed(value)
            if value is options
            else description.take(names[i] if i < len(names) else f"argument {i}", value)
            for i, value in enumerate(args)
        ]
        keywords = {
            name: _fixed(value) if value is options else description.take(name, value) for name, value in kwargs.items()
        }
        description.take_options(options)

        def invoke(tensors: Sequence[torch.Tensor]) -> Any:
            return self.inner(
                *(build(tensors) for build in positional), **{name: build(tensors) for name, build in keywords.items()}
            )

        return self._runner.run(description, invoke)


def _fixed(value: Any) -> Any:
    return lambda tensors: value
