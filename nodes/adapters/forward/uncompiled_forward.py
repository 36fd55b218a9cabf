"""Runs the passes of a step cache where the model is not compiled."""

from __future__ import annotations

from typing import Any

import torch

from .call_description import argument_names
from .forward_patch import ForwardPatch
from .step_pass import decided_pass


class UncompiledForward(ForwardPatch):
    """Replaces the forward of a diffusion model. Without a decided pass it is that forward."""

    def __init__(self, module: torch.nn.Module, inner: Any) -> None:
        super().__init__(module, inner)
        self._names = argument_names(module, inner)

    def _around(self, module: torch.nn.Module, inner: Any) -> UncompiledForward:
        return UncompiledForward(module, inner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Same arguments as `inner`."""
        given = dict(zip(self._names, args, strict=False)) | kwargs
        # A pass would skip what another pack's forward does, so that one always runs in full.
        step_pass = decided_pass(given.get("transformer_options")) if self.is_known_code else None
        if step_pass is None:
            return self.inner(*args, **kwargs)
        arguments = step_pass.arguments(self.module, given)
        latent = arguments.pop(self._names[0])
        return step_pass.finish(step_pass.run(self.module, self.inner, latent, **arguments))
