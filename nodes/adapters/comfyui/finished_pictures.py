"""Decoded pictures are finished on the GPU and come to the CPU as the last step.

Core's VAE.decode copies what a decoder gives to the CPU and finishes it there: a change of type, a copy into the
result, and three passes over it. On an H100's host they took 10 to 50 ms for 1024x1024, beside a decode of 31. The
numbers are the same on the GPU, where they take tens of bytes a pixel; a decode took 2,000.
"""

from __future__ import annotations

from typing import Any

import comfy.model_management
import comfy.sd
import torch

from ....compile_cache.torch_facts.out_of_memory import is_out_of_memory


def finish_on_gpu(vae: Any) -> None:
    """Do so in `vae`, a comfy.sd.VAE of one's own, if it is core's, for pictures, and gives them to the CPU."""
    is_of_pictures = getattr(vae, "latent_dim", None) == 2 and getattr(vae, "extra_1d_channel", None) is None
    is_core = type(vae) is comfy.sd.VAE and "decode" not in vars(vae) and not getattr(vae, "handles_tiling", False)
    if is_core and is_of_pictures and vae.device.type == "cuda" and vae.output_device.type == "cpu":
        vae.__class__ = FinishingVAE


class FinishingVAE(comfy.sd.VAE):  # type: ignore[misc]
    """A VAE that does so. A copy of one does it too; a method that was put on the object would be the original's."""

    output_device: torch.device
    resolute_result: torch.device | None = None  # while a decode runs: where its pictures shall be at the end

    def decode(self, samples_in: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self._goes_at_once(samples_in):
            self.resolute_result = wanted = self.output_device
            self.output_device = self.device
            try:
                return super().decode(samples_in, *args, **kwargs).to(wanted)
            except Exception as error:
                if not is_out_of_memory(error):  # core finds one that comes late, with the copy, and goes by tiles
                    raise
            finally:
                self.output_device, self.resolute_result = wanted, None
        return super().decode(samples_in, *args, **kwargs)

    def decode_tiled_(self, *args: Any, **kwargs: Any) -> Any:
        if self.resolute_result is not None:  # memory ran out in `decode`: nothing is put together on the GPU
            self.output_device = self.resolute_result
        return super().decode_tiled_(*args, **kwargs)

    def _goes_at_once(self, samples_in: torch.Tensor) -> bool:
        """Core decodes a batch in parts if its estimate finds too little memory; finished ones would take of it."""
        batch = samples_in.shape[0]
        estimate = batch * self.memory_used_decode(samples_in.shape, self.vae_dtype)
        return batch == 1 or estimate <= comfy.model_management.get_free_memory(self.device)
