"""Runs the passes of a step cache where the model is not compiled."""

from __future__ import annotations

from typing import Any

import torch

from .forward_patch import ForwardPatch
from .step_pass import decided_pass


class UncompiledForward(ForwardPatch):
    """Replaces the forward of a diffusion model. A call without a decided pass runs the original."""

    def _rebuilt(self, module: torch.nn.Module, inner: Any) -> UncompiledForward:
        return UncompiledForward(module, inner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = self.by_name(args, kwargs) if self.is_known_code else {}
        # A pass would skip what another pack's forward does, so that one always runs in full.
        step_pass = decided_pass(given.get("transformer_options"))
        if step_pass is None:
            return self.inner(*args, **kwargs)
        arguments = step_pass.arguments(self.module, given)
        latent = arguments.pop(self.latent_name)
        return step_pass.finish(step_pass.run(self.module, self.inner, latent, **arguments))
