"""The forward of a compiled module: it describes each call and sends it through the cache."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ....compile_cache.backends.base import Method
from ....compile_cache.keys import VAE_ROLES, Role
from ....compile_cache.modules import gguf_loras
from ....compile_cache.texts import Text
from ..blocks import vaes
from ..comfyui import core_compiler
from ..comfyui.compile_progress import CallBar, CompileProgress
from ..comfyui.transformer_options import PREFETCH
from ..dynamic_vram.timestep_lookahead import NoiseLevels
from ..process import runtime, shape_status
from ..process.compile_request import CompileRequest
from .call_description import CallDescription
from .forward_patch import ForwardPatch
from .module_runner import Invoke, ModuleRunner
from .replaced_forward import CallWatch
from .session_log import SessionLog
from .step_pass import StepPass, decided_pass
from .tile_sizes import TileSizes, is_tile

_DOING = {Role.UNET: Text("sampling"), Role.VAE_DECODE: Text("decoding"), Role.VAE_ENCODE: Text("encoding")}


class CompiledForward(ForwardPatch):
    """Replaces a module's forward by calls of the cache.

    The first argument of `inner` is the latent; the others are described by name. If a step cache decided a pass for a
    call, that pass runs. Each kind of pass has its own graphs over the same regions, because its blocks are the same.
    """

    def __init__(self, module: torch.nn.Module, inner: Any, request: CompileRequest) -> None:
        super().__init__(module, inner)
        self._request, self._role = request, request.role
        doing = _DOING.get(request.role, Text("running"))
        progress = CompileProgress(request.node_id, doing, runtime.waiting_seconds)
        self.runner = ModuleRunner(module, request, progress)
        self._pass_runners: dict[Role, ModuleRunner] = {}
        self._log = SessionLog(progress, request, self.runner.facts)
        self.watch = CallWatch()
        self._levels = NoiseLevels()
        self._bar, self._tiles = CallBar(), TileSizes()
        # A decode or an encode is one call outside any sampling run, so no callback asks for an inspection before it.
        self._inspect_every_call = request.role in VAE_ROLES
        self._inspect_next_call = True

    @property
    def role(self) -> Role:
        """The role of full calls; each pass of a step cache has its own role."""
        return self._role

    def count_regions(self) -> None:
        """Count the module's regions and the ready ones among them, for the progress of the prompt's compile nodes.

        Raises UserError for a name of `left_out` that the module does not have.
        """
        request, backend = self._request, self._request.backend.name
        compiles = request.capabilities.compiles or request.left_out
        count = runtime.hooks_for(self.module, request, backend).count() if compiles else 0
        self.runner.progress.set_total(min(self._ready_regions(backend), count) if count else 0, count)

    def _ready_regions(self, backend: str) -> int:
        module, cache = self.module, runtime.cache()
        program = runtime.record_of(module).programs.get((backend, self._request.left_out, self._role))
        compiled = program.regions[0] if program is not None else 0
        if self._request.backend.is_starting:  # a look into its store would wait
            return compiled
        model = runtime.fingerprint_of(module)
        found = shape_status.of_model(model, backend, cache, runtime.device())
        return max(compiled, len(found.in_memory | found.on_disk))

    def _rebuilt(self, module: torch.nn.Module, inner: Any) -> CompiledForward:
        return CompiledForward(module, inner, self._request)

    # --- callbacks of the patcher, see `patch_install` ---------------------------------------------------------

    def begin(self, model: Any = None) -> None:
        """A sampling run of core's `model` starts, with the weights loaded: inspect the modules at its first call."""
        self._levels.begin(model)
        runtime.cache().open_session(self.runner.owner)
        self._inspect_next_call = True
        self.watch.begin()
        self._log.begin()

    def end(self) -> None:
        """The sampling run ended, successfully or not."""
        runtime.cache().close_session(self.runner.owner)
        self._log.end(why_no_calls=self.watch.end())
        self.runner.weights.paged.run_ends()

    def weights_loaded(self) -> None:
        """ComfyUI loaded the model, or more of it: inspect the modules at the next call."""
        self._inspect_next_call = True
        self.runner.weights.paged.loaded()

    def weights_detached(self, unpatched: bool) -> None:
        """ComfyUI detached the weights. If it did so for good, drop stale captures at once.

        ComfyUI also detaches before each sampling run and then loads the same weights again; a model without sampling
        runs (a ControlNet) gets no other callback. And it detaches when a clone is garbage collected, in any thread,
        which must not wait for the cache. In both cases only the next call inspects the modules.
        """
        super().weights_detached(unpatched)
        self._inspect_next_call = True
        if not unpatched or self._module() is None:
            return
        gguf_loras.forget(self.module.parameters())
        if self.runner.weights.paged.pages:  # captures over pages stay valid while the weights are unloaded
            if not runtime.cache().captures_of(self.runner.owner):
                self.runner.weights.stable_addresses.forget()
            return
        self.runner.weights.refresh(inspect_modules=True)
        runtime.cache().drop_stale(self.runner.owner, self.runner.weights.epoch)

    # --- the call ----------------------------------------------------------------------------------------------

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        inspect_modules, self._inspect_next_call = self._inspect_next_call or self._inspect_every_call, False
        self.watch.calls += 1
        try:
            with core_compiler.switched_off():
                return self._answer(args, kwargs, inspect_modules)
        except BaseException:
            self._inspect_next_call = True  # the inspection may not have happened
            raise

    def _answer(self, args: Sequence[Any], kwargs: dict[str, Any], inspect_modules: bool) -> Any:
        given = self.by_name(args, kwargs)
        if self._role in VAE_ROLES:
            return self._answer_vae(args, kwargs, given[self.latent_name], inspect_modules)
        is_control = self._role is Role.CONTROLNET
        if is_control:
            self._log.begin_once()
        self._log.note_latent(given[self.latent_name], given.get("transformer_options"))
        step_pass = self._decided_pass(given.get("transformer_options"))
        if step_pass is not None:
            runner = self._runner_for(step_pass.role)
            return step_pass.finish(runner.run(*self.describe_pass(given, step_pass), inspect_modules))
        with self._log.call() if is_control else contextlib.nullcontext():
            return self.runner.run(*self.describe(args, kwargs), inspect_modules)

    def _answer_vae(
        self, args: Sequence[Any], kwargs: dict[str, Any], latent: torch.Tensor, inspect_modules: bool
    ) -> Any:
        """Log each call by itself, also a cancelled one. A tile has no progress bar: core shows one for all tiles."""
        progress, is_whole = self.runner.progress, False
        self._log.begin()
        self._log.note_latent(latent, None)
        if not is_tile():
            progress.of_call = self._bar
            self._bar.begin(latent.shape)
        try:
            result = self.runner.run(*self.describe(args, kwargs), inspect_modules)
            is_whole = True
        except progress.cancellations:
            self._log.end(is_logged=False)
            raise
        finally:
            if progress.of_call is not None:
                self._bar.end(is_whole)
                progress.of_call = None
        self._log.end(is_logged=False)
        return result

    def _decided_pass(self, options: Any) -> StepPass | None:
        # A pass would skip another pack's forward, so such a forward always runs in full.
        return decided_pass(options) if self._role is Role.UNET and self.is_known_code else None

    def _runner_for(self, role: Role) -> ModuleRunner:
        if role not in self._pass_runners:
            self._pass_runners[role] = self.runner.for_role(role)
        return self._pass_runners[role]

    # --- its description ---------------------------------------------------------------------------------------

    def describe(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[CallDescription, Invoke]:
        """The tensors and plain values of a call, and how to call `inner` with other tensors in their place."""
        return self._describe(self.by_name(args, kwargs), by_place=len(args) if self.takes_any_arguments else 1)

    def describe_pass(self, given: dict[str, Any], step_pass: StepPass) -> tuple[CallDescription, Invoke]:
        """`describe` for a pass of a step cache. given: the arguments of `inner`, by name."""

        def call(latent: torch.Tensor, **arguments: Any) -> Any:
            return step_pass.run(self.module, self.inner, latent, **arguments)

        description, invoke = self._describe(step_pass.arguments(self.module, given), call)
        description.values.extend(step_pass.settings)
        return description, invoke

    def _describe(
        self, given: dict[str, Any], call: Callable[..., Any] | None = None, by_place: int = 1
    ) -> tuple[CallDescription, Invoke]:
        """call: replaces `inner`, with the same arguments. by_place: how many of them are passed by position."""
        places = list(given)[1:by_place]
        given = dict(given)
        options = given.pop("transformer_options", None)
        description = CallDescription()
        description.values.extend(("left out", name) for name in self._request.left_out)
        # The latent comes first in every order of arguments, because its shape identifies a graph.
        latent = description.add("latent", given.pop(self.latent_name))
        others = {name: description.add(name, value) for name, value in given.items()}
        passed_on: dict[str, Any] = {}
        if not self.is_known_code:  # it may count steps or depend on earlier calls
            description.forbid_capture("another pack put a forward of its own into the model")
        if options is not None:
            description.add_options(options, self.module)
            passed_on["transformer_options"] = options
        prefetches = options is not None and bool(options.get(PREFETCH))

        def arguments(tensors: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            named = {**{name: build(tensors) for name, build in others.items()}, **passed_on}
            return (latent(tensors), *(named.pop(name) for name in places)), named

        paged = self.runner.weights.paged

        def invoke(tensors: Sequence[torch.Tensor]) -> Any:
            positional, named = arguments(tensors)
            if prefetches:  # resident pages need no prefetch, and core's wait would abort a capture
                options[PREFETCH] = not paged.is_in_place
            forward = call or self.inner
            looks_ahead = paged.streams and description.policy.is_repeatable
            if not looks_ahead or given.get("control") is not None:
                return forward(*positional, **named)
            with paged.lookahead.with_forwards(lambda: self._levels.forwards(forward, positional, named)):
                return forward(*positional, **named)

        if self._role in VAE_ROLES:
            self._tiles.describe(description)
            # Image decoders are captured without a comparison: they were measured to be faster compiled.
            coder = vaes.coder_of(self.module, self._role)
            of_videos = coder is not None and coder.of_videos
            description.benchmark_eager = self._role is Role.VAE_ENCODE or of_videos
            keeps_too_much = coder is not None and not coder.may_capture(description.tensors[0])
            if keeps_too_much or "output_buffer" in description.names:  # a replay would fill the captured one
                description.policy = description.policy.uncaptured()
        if call is None and self.is_known_code:
            description.method = Method(self.inner.__name__, arguments)
        return description, invoke
