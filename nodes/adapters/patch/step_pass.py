"""Step caches: a model's forward runs the pass that a step cache chose, in place of the original forward.

A step cache (such as DeepCache) reuses work between the steps of a sampling run. Its node wraps the calls of the model,
chooses the pass for each call, and puts that StepPass into transformer_options. CompiledForward and UncompiledForward
run the StepPass that they read there; they know no step cache by name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol

import torch

from ....compile_cache.keys import Component, Role
from ..comfyui.transformer_options import STEP_PASS
from .forward_patch import ForwardPatch


class StepCacheRun(Protocol):
    """The state of a step cache during one sampling run."""

    passes: Counter[str]  # how often each kind of pass has run; 0 for a kind that has not run yet


class StepPass(ABC):
    """One pass through a diffusion model, decided for one call.

    `run` may be captured and replayed, so it must depend only on its arguments and on `settings`, and must have no side
    effects. `finish` stores the state that later steps need.
    """

    role: ClassVar[Role]  # part of its graphs' key

    @property
    @abstractmethod
    def settings(self) -> tuple[Component, ...]:
        """Plain values, by name, that change the result of the pass: part of its graphs' key."""

    def arguments(self, module: torch.nn.Module, given: dict[str, Any]) -> dict[str, Any]:
        """Select the arguments of `run`, by name, from `given`, the arguments of the model's forward.

        Leave out each tensor that the pass does not read: a tensor is part of the key and is copied for a replay.
        """
        return given

    @abstractmethod
    def run(self, module: torch.nn.Module, forward: Callable[..., Any], latent: torch.Tensor, **arguments: Any) -> Any:
        """Compute the pass. forward: the model's own, with the latent (batch first) as its first argument."""

    @abstractmethod
    def finish(self, output: Any) -> Any:
        """Store the parts of `run`'s output that later steps need, and return the result of the model's forward."""


def decided_pass(options: Mapping[str, Any] | None) -> StepPass | None:
    """The pass that a step cache decided for the call with these transformer_options."""
    found = None if options is None else options.get(STEP_PASS)
    return found if isinstance(found, StepPass) else None


class UncompiledForward(ForwardPatch):
    """Replaces the forward of a diffusion model. A call without a decided pass runs the original."""

    def _rebuilt(self, module: torch.nn.Module, inner: Any) -> UncompiledForward:
        return UncompiledForward(module, inner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = self.by_name(args, kwargs) if self.is_known_code else {}
        # A pass would skip another pack's forward, so such a forward always runs in full.
        step_pass = decided_pass(given.get("transformer_options"))
        if step_pass is None:
            return self.inner(*args, **kwargs)
        arguments = step_pass.arguments(self.module, given)
        latent = arguments.pop(self.latent_name)
        return step_pass.finish(step_pass.run(self.module, self.inner, latent, **arguments))
