"""Run one module through the cache: find its program, key and weights epoch."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ....compile_cache.backends.base import Call, Program
from ....compile_cache.call_policy import CallPolicy
from ....compile_cache.code_identity.authors import foreign_on_every_module
from ....compile_cache.config import BACKGROUND
from ....compile_cache.errors import BypassCode, BypassReason
from ....compile_cache.keys import GraphKey, Role
from ....compile_cache.telemetry.rows import BACKEND, MODEL
from ....compile_cache.telemetry.run_summary import size_text
from ....compile_cache.telemetry.stats import SHORT_WAIT
from ....compile_cache.torch_compat.flags import intercepting_mode, torch_flags
from ..comfyui import core_compiler
from ..comfyui.compile_progress import CompileProgress
from ..comfyui.quantization import formats_in_words
from ..process import runtime
from ..process.compile_request import CompileRequest
from ..report import runs
from .call_description import CallDescription

Invoke = Callable[[Sequence[torch.Tensor]], Any]

_MAX_KEYS = 1024
_loaded: set[str] = set()  # names of backends


class ModuleRunner:
    """Runs the calls of one module in one role, for one compile node's request."""

    def __init__(
        self, module: torch.nn.Module, request: CompileRequest, progress: CompileProgress, role: Role | None = None
    ) -> None:
        """role: of the calls, by default the request's. A pass of a step cache has its own."""
        self.progress = progress
        self._background_compile = runtime.cache().config.compile == BACKGROUND
        record = runtime.record_of(module)
        self.owner = record.owner
        self.weights = record.weights
        # The log of a run may outlive the module, and must not keep its weights.
        runner = weakref.ref(self)
        self.facts = lambda: {} if (found := runner()) is None else found._facts()
        self._module = weakref.ref(module)  # see ForwardPatch
        self._request = request
        self._role = role or request.role
        self._programs: dict[str, tuple[Program, str]] = {}
        self._fallback: Program | None = None
        self._changed = False  # see `_unless_changed`
        self._keys: dict[tuple[Any, ...], GraphKey] = {}  # by quick key; one object per key: identity lookups

    def for_role(self, role: Role) -> ModuleRunner:
        """A runner of the same module in another role; both share one program."""
        return ModuleRunner(self._loaded_module(), self._request, self.progress, role)

    def program(self, device: str) -> tuple[Program, str]:
        """The program for a type of device and the name of its backend."""
        if device not in self._programs:
            self._programs[device] = self._load_program(device)
        return self._programs[device]

    def _program_now(self, device: str) -> tuple[Program, str]:
        """`program` without blocking: while the backend is imported, a fallback captures the eager module."""
        if not self._may_compile_in_background() or self._programs or not self._request.backend.is_starting:
            self._fallback = None
            return self.program(device)
        self._fallback = self._fallback or runtime.fallback_program(self._loaded_module(), device)
        return self._fallback, self._request.backend.name

    def _load_program(self, device: str) -> tuple[Program, str]:
        """The first load after a start imports the compiler and waits for `preload`. It blocks the prompt."""
        cache, module = runtime.cache(), self._loaded_module()
        self.progress.loading()
        name = self._request.backend.name
        with cache.stats.stall("load", BACKEND if name not in _loaded else MODEL, SHORT_WAIT):
            program, backend = runtime.program_for(module, self._request, device)
            _loaded.add(name)
        return program, backend

    def _facts(self) -> dict[str, Any]:
        """The fields of a `Run` about the module; empty after the module was garbage collected."""
        module = self._module()
        if module is None:
            return {}
        programs = [(program.quantized, torch.device(device)) for device, (program, _) in self._programs.items()]
        return {
            "structure": runtime.record_of(module).structure(),
            "formats": tuple(text for each in programs for text in formats_in_words(*each)),
            "step_bytes": self.weights.paged.step_bytes(),
            "times": runtime.cache().compiled_vs_eager.times_of(self.owner),
        }

    def run(self, description: CallDescription, invoke: Invoke, inspect_modules: bool = False) -> Any:
        """Run one call. invoke: calls the original forward with tensors that replace the described ones.

        inspect_modules: also look for changes that do not move the weights, as in the first call of a run.
        """
        try:
            return self._run(description, invoke, inspect_modules)
        finally:
            self.progress.finish()

    def _run(self, description: CallDescription, invoke: Invoke, inspect_modules: bool) -> Any:
        cache = runtime.cache()
        program, backend = self._program_now(description.tensors[0].device.type)
        self.weights.paged.dtype = description.tensors[0].dtype  # core casts the latent to the compute dtype
        self.weights.paged.reorder_pages()
        inspected = self.weights.refresh()
        call = self._call(description, invoke, backend, inspect_modules)
        if self._changed and not (inspected or inspect_modules):  # likely still changed: check before a replay
            call = self._unless_changed(call)

        def recheck() -> Call:
            nonlocal call
            if inspect_modules:
                self.weights.refresh(inspect_modules=True)
                if self.weights.epoch != call.epoch:
                    call = self._call(description, invoke, backend, inspect_modules)
            elif not call.policy.is_eager:
                call = self._unless_changed(call)
            return call

        counters = cache.stats.counters
        waiting, originals, eager = counters.waiting_calls, counters.original_replays, counters.eager_calls
        result = cache.run(program, call, None if inspected else recheck)
        if inspect_modules and self._fallback is None:
            self.progress.note_count(*program.regions)
        if counters.original_replays != originals:
            self.progress.note_waiting_call(lambda: cache.gain_of_originals(self.owner))
        elif counters.waiting_calls != waiting or self._fallback is not None:
            self.progress.note_waiting_call()
        elif self.progress.is_waiting and counters.eager_calls == eager:
            self.progress.note_all_compiled()
        return result

    def _may_compile_in_background(self) -> bool:
        """True if missing code may compile in the background. A warm-up compiles synchronously."""
        return self._background_compile and not runs.is_warm_up_prompt()

    def _unless_changed(self, call: Call) -> Call:
        """The call, or an eager one if another pack changed the model since the last inspection.

        Calls run eagerly while the monkeypatch is in place: each new state would cost a compile and a capture.
        """
        change = self.weights.change()
        self._changed = bool(change)
        if not change:
            return call
        detail = f"another pack changed {change} within a sampling run: the model runs eagerly until that is undone"
        return replace(call, policy=call.policy.eager(BypassReason(BypassCode.OBSERVED_INPUT, detail)))

    def _policy(self, description: CallDescription) -> CallPolicy:
        """Process-wide checks come first, then the checks of the arguments and of the weights."""
        observed = _forward_bypass()
        return (
            description.policy.run_once(self.weights.blocker)
            if observed is None
            else description.policy.eager(observed)
        )

    def _call(self, description: CallDescription, invoke: Invoke, backend: str, begins_run: bool) -> Call:
        return Call(
            key=self._key(description, backend),
            tensors=description.tensors,
            invoke=invoke,
            device=str(description.tensors[0].device),
            epoch=self.weights.epoch,
            torch_flags=torch_flags(description.tensors[0].device.type),
            policy=self._policy(description),
            why_captured=description.why_captured,
            benchmark_eager=description.benchmark_eager,
            background_compile=self._may_compile_in_background(),
            begins_run=begins_run,
            progress=self.progress,
            module=self._loaded_module(),
            method=description.method,
            weights=self.weights.paged,
        )

    def _loaded_module(self) -> torch.nn.Module:
        module = self._module()
        assert module is not None, "a module that was garbage collected is called"
        return module

    def _key(self, description: CallDescription, backend: str) -> GraphKey:
        model = runtime.fingerprint_of(self._loaded_module())
        quick_key = (model, backend, description.quick_key())
        key = self._keys.get(quick_key)
        if key is None:
            if len(self._keys) >= _MAX_KEYS:
                self._keys.clear()
            runtime.cache().shapes.set_name(model, self._request.label)
            key = self._keys[quick_key] = GraphKey(description.signature(), self._role, model, backend)
            runtime.cache().shapes.set_size(key, self._size(description))
        return key

    def _size(self, description: CallDescription) -> str:
        """The size and batch as the user set them. CFG doubles the batch, which a ControlNet's call does not reveal."""
        shape = description.tensors[0].shape
        if len(shape) < 4:  # audio has no pixels
            return ""
        batch, *_, height, width = shape
        if self._role is Role.CONTROLNET:
            batch = 1
        elif description.conds and batch % description.conds == 0:
            batch //= description.conds
        return size_text(self._request.cell * width, self._request.cell * height, batch)


def _forward_bypass() -> BypassReason | None:
    if torch.is_grad_enabled():
        return BypassReason(BypassCode.GRADIENT, "gradients are on: a compiled graph has no backward pass")
    if torch.compiler.is_compiling():
        return BypassReason(BypassCode.OBSERVED_INPUT, "another pack is compiling this model")
    everywhere = foreign_on_every_module()
    if everywhere:
        return BypassReason(BypassCode.REPLACED_FORWARD, f"another pack {everywhere}")
    mode = intercepting_mode()
    if mode is not None:
        return BypassReason(BypassCode.OBSERVED_INPUT, f"another pack's {mode} watches every operation of the model")
    if core_compiler.is_recording():
        return BypassReason(BypassCode.CORE_COMPILER, "ComfyUI's own compiler is recording this call")
    return None
