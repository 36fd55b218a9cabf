"""The function that stands where a module's forward stood: it describes the call and sends it through the cache."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ....compile_cache.backends.base import Method
from ....compile_cache.keys import Role
from ....compile_cache.regions.region import Hook, HookBuilder, RegionRunner
from ..blocks.common import Bypass
from ..comfyui.progress import NodeProgress
from ..process import runtime
from .call_description import CallDescription, argument_names
from .forward_patch import ForwardPatch
from .module_runner import Invoke, ModuleRunner
from .session_log import SessionLog
from .step_pass import StepPass, decided_pass

# Finds the hooks of a module: `hooks` of one of the files in `blocks`.
Family = Callable[[torch.nn.Module, RegionRunner, Bypass], list[Hook]]


class CompiledForward(ForwardPatch):
    """The first argument of `inner` is the latent; whatever else it takes is described by name.

    A call for which a step cache decided a pass runs that pass. Each kind of pass has graphs of its own, over the same
    regions: the blocks are the same modules.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        inner: Any,
        backend: str,
        role: Role,
        families: Sequence[Family],
        node_id: str | None,
        label: str = "",
    ) -> None:
        """label: what people call the model; its class, if nothing is given."""
        super().__init__(module, inner)
        build_hooks = _hook_builder(module, families)
        label = label or type(module).__name__
        self.runner = ModuleRunner(module, backend, role, build_hooks, NodeProgress(node_id), label)
        self._role = role
        self._pass_runners: dict[Role, ModuleRunner] = {}
        self._made_with = (backend, role, families, node_id, label)
        self._log = SessionLog(self.runner)
        # A decode is one call, with no sampling run around it that would look at the module first, and tell of it.
        self._looks_always = role is Role.VAE_DECODE
        self._look = True
        self._names = argument_names(module, inner)

    def _around(self, module: torch.nn.Module, inner: Any) -> CompiledForward:
        return CompiledForward(module, inner, *self._made_with)

    # --- moments in the life of the patcher, see `hooking` -----------------------------------------------------

    def begin(self) -> None:
        """A sampling run starts, with the weights loaded: look at the model closely before its first call."""
        runtime.cache().open_session(self.runner.owner)
        self._look = True
        self._log.begin()

    def end(self) -> None:
        """The run is over, however it ended."""
        runtime.cache().close_session(self.runner.owner)
        self._log.end()

    def weights_loaded(self) -> None:
        """ComfyUI loaded the model, or more of it: look at it closely before the next call."""
        self._look = True

    def weights_detached(self, unpatched: bool) -> None:
        """ComfyUI took the model down: stale captures go at once.

        It does so before every sampling run too, only to take the same weights up again, and tells nothing else of a
        model without runs (a ControlNet): the next call looks closely then. So does a clone that is collected, in any
        thread, which must not wait for the cache.
        """
        super().weights_detached(unpatched)
        self._look = True
        if not unpatched or self._module() is None:
            return
        self.runner.weights.refresh(thorough=True)
        runtime.cache().drop_stale(self.runner.owner, self.runner.weights.epoch)

    # --- the call ----------------------------------------------------------------------------------------------

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Same arguments as `inner`."""
        thorough, self._look = self._look or self._looks_always, False
        try:
            return self._answer(self._named(args, kwargs), thorough)
        except BaseException:
            self._look = True  # nobody knows how far it came
            raise

    def _answer(self, given: dict[str, Any], thorough: bool) -> Any:
        step_pass = self._decided_pass(given.get("transformer_options"))
        if step_pass is None:
            return self._run_whole(given, thorough)
        runner = self._runner_for(step_pass.role)
        return step_pass.finish(runner.run(*self.describe_pass(given, step_pass), thorough))

    def _run_whole(self, given: dict[str, Any], thorough: bool) -> Any:
        if not self._looks_always:
            return self.runner.run(*self._describe(given), thorough)
        self._log.begin()
        result = self.runner.run(*self._describe(given), thorough)
        self._log.end(only_if_waited=True)
        return result

    def describe(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[CallDescription, Invoke]:
        """The tensors and plain values of a call, and how to call `inner` with other tensors in their place."""
        return self._describe(self._named(args, kwargs))

    def _named(self, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        return {self._names[index]: value for index, value in enumerate(args)} | kwargs

    def _decided_pass(self, options: Any) -> StepPass | None:
        # A pass would skip what another pack's forward does, so that one always runs in full.
        return decided_pass(options) if self._role is Role.UNET and self.is_known_code else None

    def _runner_for(self, role: Role) -> ModuleRunner:
        if role not in self._pass_runners:
            self._pass_runners[role] = self.runner.for_role(role)
        return self._pass_runners[role]

    def _describe(
        self, given: dict[str, Any], call: Callable[..., Any] | None = None
    ) -> tuple[CallDescription, Invoke]:
        """`call`: what is called in place of `inner`, with the same arguments."""
        given = dict(given)
        options = given.pop("transformer_options", None)
        description = CallDescription()
        # The latent's shape is what people know a graph by: it comes first however the call was written.
        first = description.take("latent", given.pop(self._names[0]))
        others = {name: description.take(name, value) for name, value in given.items()}
        passed_on: dict[str, Any] = {}
        if not self.is_known_code:  # it may count steps, or decide by what it saw before
            description.block("another pack put a forward of its own into the model")
        if options is not None:
            description.take_options(options, self.module)
            passed_on["transformer_options"] = options

        def arguments(tensors: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            return (first(tensors),), {**{name: build(tensors) for name, build in others.items()}, **passed_on}

        def invoke(tensors: Sequence[torch.Tensor]) -> Any:
            positional, named = arguments(tensors)
            return (call or self.inner)(*positional, **named)

        if call is None and self.is_known_code:
            description.method = Method(self.inner.__name__, arguments)
        return description, invoke

    def describe_pass(self, given: dict[str, Any], step_pass: StepPass) -> tuple[CallDescription, Invoke]:
        """The same for a pass of a step cache. given: the arguments of `inner`, by name."""

        def call(latent: torch.Tensor, **arguments: Any) -> Any:
            return step_pass.run(self.module, self.inner, latent, **arguments)

        description, invoke = self._describe(step_pass.arguments(self.module, given), call)
        description.values.extend(step_pass.settings)
        return description, invoke


def _hook_builder(module: torch.nn.Module, families: Sequence[Family]) -> HookBuilder:
    alive = weakref.ref(module)  # the program that keeps this function belongs to the module, and must not keep it

    def build(run: RegionRunner, bypass: Bypass) -> list[Hook]:
        root = alive()
        return [] if root is None else [hook for family in families for hook in family(root, run, bypass)]

    return build
