"""Runs the passes of DeepCache where the model is not compiled. `compiled_forward` does it where it is."""

from __future__ import annotations

from typing import Any

import torch

from ..forward.forward_patch import ForwardPatch
from .passes import Fast, decided, run_fast, run_full, shallow_control


class DeepCacheForward(ForwardPatch):
    """Stands for `_forward` of core's UNetModel and has its arguments; without a decision it is that forward."""

    def _around(self, module: torch.nn.Module, inner: Any) -> DeepCacheForward:
        return DeepCacheForward(module, inner)

    def __call__(
        self,
        x: torch.Tensor,
        timesteps: Any = None,
        context: Any = None,
        y: Any = None,
        control: Any = None,
        transformer_options: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        options: dict[str, Any] = {} if transformer_options is None else transformer_options
        chosen = decided(options) if self.is_known_code else None
        unet: Any = self.module
        if isinstance(chosen, Fast):
            control = shallow_control(control, len(unet.output_blocks), chosen.depth)
            result = run_fast(unet, chosen.depth, chosen.feature, x, timesteps, context, y, control, options, **kwargs)
            chosen.done()
            return result

        def call(inside: dict[str, Any]) -> Any:
            return self.inner(x, timesteps, context, y, control, inside, **kwargs)

        if chosen is None:
            return call(options)
        result, feature = run_full(unet, chosen.depth, call, options)
        chosen.done(feature)
        return result
