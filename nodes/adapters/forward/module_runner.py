"""Run one module of ComfyUI's through the cache: what the diffusion model and the VAE decoder have in common."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ....compile_cache.backends import registry
from ....compile_cache.backends.base import Call, Program
from ....compile_cache.compute_state import compute_state, intercepting_mode
from ....compile_cache.errors import BypassCode, BypassReason
from ....compile_cache.keys import GraphKey, Role
from ....compile_cache.regions.region import HookBuilder
from ..comfyui.progress import NodeProgress
from ..process import runtime
from ..restart.recapture import recapture
from .call_description import CallDescription

logger = logging.getLogger(__name__)

Invoke = Callable[[Sequence[torch.Tensor]], Any]

_KEPT_KEYS = 1024


def prepare_backend(name: str, device: torch.device, node_id: str | None) -> None:
    """Check a backend for a device, let it get ready, and say on the node what runs, and why it is not the fastest.

    Raises UnknownBackendError or BackendUnavailableError.
    """
    backend, _, why = registry.resolve(name, device.type)
    backend.prewarm(device, runtime.cache().config)
    logger.info("Resolute: backend %s", why)
    NodeProgress(node_id).show(f"backend: {why}")


def explain_passthrough(reason: str, node_id: str | None) -> None:
    """Say on the node, and in the log, why what came in goes out as it is."""
    logger.info("Resolute: %s", reason)
    NodeProgress(node_id).show(reason)


class ModuleRunner:
    """One module, one backend, one role.

    `backend` was checked for the device where the module will run; a module that turns up on another device is bound
    again there, and `auto` is resolved again.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        backend: str,
        role: Role,
        build_hooks: HookBuilder,
        progress: NodeProgress,
        label: str,
    ) -> None:
        """label: what people call the model."""
        self.progress = progress
        self.weights = runtime.weights_of(module)
        self.owner = runtime.owner_of(module)
        self._module = weakref.ref(module)  # see CompiledForward
        self._backend = backend
        self._role = role
        self._build_hooks = build_hooks
        self._label = label
        self._recaptured: set[GraphKey] = set()
        self._programs: dict[str, tuple[Program, str]] = {}
        self._keys: dict[tuple[Any, ...], GraphKey] = {}  # by form: one object per key is found faster in the cache

    def for_role(self, role: Role) -> ModuleRunner:
        """A runner of the same module in another role; both share one program."""
        return ModuleRunner(self._alive(), self._backend, role, self._build_hooks, self.progress, self._label)

    def program(self, device: str) -> tuple[Program, str]:
        """The program for a type of device and the name of its backend."""
        if device not in self._programs:
            self._programs[device] = runtime.program_for(self._alive(), self._backend, device, self._build_hooks)
        return self._programs[device]

    def run(self, description: CallDescription, invoke: Invoke, thorough: bool = False) -> Any:
        """Answer one call; `invoke` calls the original forward with other tensors in place of the described ones.

        `thorough`: look at the module closely, as in the first call of a sampling run.
        """
        program, backend = self.program(description.tensors[0].device.type)
        looked = self.weights.refresh()
        call = self._call(description, invoke, backend)

        def recheck() -> Call:
            nonlocal call
            self.weights.refresh(thorough=True)
            if self.weights.epoch != call.epoch:
                call = self._call(description, invoke, backend)
            return call

        result = runtime.cache().run(program, call, recheck if thorough and not looked else None)
        can = program.capabilities
        if can.captures and can.returns_memory and call.key not in self._recaptured:
            self._recaptured.add(call.key)
            recapture(program, call, self.weights.recaptured)
        return result

    def _call(self, description: CallDescription, invoke: Invoke, backend: str) -> Call:
        return Call(
            key=self._key(description, backend),
            tensors=description.tensors,
            invoke=invoke,
            device=str(description.tensors[0].device),
            epoch=self.weights.epoch,
            state=compute_state(description.tensors[0].device.type),
            forward_bypass=_forward_bypass(),
            capture_blocker=description.blocker or self.weights.blocker,
            progress=self.progress,
            module=self._alive(),
            method=description.method,
        )

    def _alive(self) -> torch.nn.Module:
        module = self._module()
        assert module is not None, "a call of a module that is gone"
        return module

    def _key(self, description: CallDescription, backend: str) -> GraphKey:
        model = runtime.fingerprint_of(self._alive()).digest
        form = (model, backend, description.form())
        key = self._keys.get(form)
        if key is None:
            if len(self._keys) >= _KEPT_KEYS:
                self._keys.clear()
                self._recaptured.clear()
            runtime.cache().shapes.set_name(model, self._label)
            key = self._keys[form] = GraphKey(description.signature(), self._role, model, backend)
        return key


def _forward_bypass() -> BypassReason | None:
    if torch.is_grad_enabled():
        return BypassReason(BypassCode.GRADIENT, "gradients are on: a compiled graph has no backward pass")
    if torch.compiler.is_compiling():
        return BypassReason(BypassCode.OBSERVED_INPUT, "another pack is compiling this model")
    mode = intercepting_mode()
    if mode is not None:
        return BypassReason(BypassCode.OBSERVED_INPUT, f"another pack's {mode} watches every operation of the model")
    return None
