"""Finish decoded pictures and videos on the GPU, and copy them to the CPU as the last step.

Core's VAE.decode copies the decoder's result to the CPU and finishes it there: a change of dtype, a copy into the
result, and three passes over it. On an H100's host this took 10 to 50 ms for 1024x1024, beside a decode of 31 ms. On
the GPU it gives the same numbers and takes 24 bytes a pixel. The decode of a picture took 2,000 bytes a pixel. The
decode of a video needs no more for more frames, so a long video is finished on the GPU only if there is room.
"""

from __future__ import annotations

import math
from typing import Any

import comfy.model_management
import comfy.sd
import torch

from ....compile_cache.torch_compat.out_of_memory import is_out_of_memory

_STAGE = 8 << 20  # bytes of a buffer


def copied_to_cpu(finished: torch.Tensor) -> torch.Tensor:
    """A copy of a GPU's tensor in the CPU's memory, with the same strides.

    The GPU fills one pinned buffer while all threads copy from the other. In torch's own copy, one thread faults in
    each new page: 388 MB took 0.29 s on an H100's host, 0.04 s with buffers of 4 MB, and 0.02 s with buffers of 16 MB.
    A picture of 12 MB takes 1 ms either way. A tensor that requires gradients uses torch's copy, which has a gradient.
    """
    bytes_each = finished.element_size()
    size, all_sizes = _STAGE // bytes_each, finished.numel()
    if all_sizes <= 2 * size or finished.requires_grad or not _is_dense(finished):
        return finished.cpu()
    result = torch.empty_strided(finished.shape, finished.stride(), dtype=finished.dtype)
    sources, targets = (torch.split(each.as_strided((all_sizes,), (1,)), size) for each in (finished, result))
    try:
        buffers = [_pinned(size, finished.dtype) for _ in range(2)]
    except RuntimeError:  # the system pins no more memory
        return finished.cpu()
    coming: tuple[torch.Tensor, torch.Tensor, Any] | None = None
    for number, (source, target) in enumerate(zip(sources, targets, strict=True)):
        buffer = buffers[number % 2][: source.numel()].copy_(source, non_blocking=True)
        event = _recorded(finished.device)
        if coming is not None:
            _take(*coming)
        coming = target, buffer, event
    assert coming is not None, "it has several parts"
    _take(*coming)
    return result


def _pinned(size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, pin_memory=True)


def _recorded(device: torch.device) -> Any:
    return torch.cuda.current_stream(device).record_event()


def _take(target: torch.Tensor, buffer: torch.Tensor, event: Any) -> None:
    event.synchronize()
    target.copy_(buffer)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Its elements fill its memory, in some order of the dimensions."""
    by_stride = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    return tensor.permute(by_stride).is_contiguous()


def finish_on_gpu(vae: Any) -> None:
    """Make the caller's own `vae` a FinishingVAE if it is core's and decodes pixels on CUDA for the CPU."""
    has_pixels = getattr(vae, "latent_dim", None) in (2, 3) and getattr(vae, "extra_1d_channel", None) is None
    is_core = type(vae) is comfy.sd.VAE and "decode" not in vars(vae) and not getattr(vae, "handles_tiling", False)
    if is_core and has_pixels and vae.device.type == "cuda" and vae.output_device.type == "cpu":
        vae.__class__ = FinishingVAE


class FinishingVAE(comfy.sd.VAE):  # type: ignore[misc]
    """A VAE that finishes on the GPU, as do its copies. A method set on the object would stay bound to the original."""

    output_device: torch.device
    resolute_result: torch.device | None = None  # during a decode: the device for its result

    def decode(self, samples_in: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self._fits_on_gpu(samples_in):
            self.resolute_result = wanted = self.output_device
            self.output_device = self.device
            try:
                return self._to_cpu(super().decode(samples_in, *args, **kwargs))
            except Exception as error:
                if not is_out_of_memory(error):  # core's way also catches an OOM at its copy, and tiles
                    raise
            finally:
                self.output_device, self.resolute_result = wanted, None
        return super().decode(samples_in, *args, **kwargs)

    def decode_tiled_(self, *args: Any, **kwargs: Any) -> Any:
        self._put_together_on_cpu()
        return super().decode_tiled_(*args, **kwargs)

    def decode_tiled_3d(self, *args: Any, **kwargs: Any) -> Any:
        self._put_together_on_cpu()
        return super().decode_tiled_3d(*args, **kwargs)

    def _to_cpu(self, decoded: torch.Tensor) -> torch.Tensor:
        """The result on the CPU; a tiled one is there already. A local in `decode` would keep it alive in the retry."""
        return decoded if self.output_device == self.resolute_result else copied_to_cpu(decoded)

    def _put_together_on_cpu(self) -> None:
        if self.resolute_result is not None:  # memory ran out in `decode`
            self.output_device = self.resolute_result

    def _fits_on_gpu(self, samples_in: torch.Tensor) -> bool:
        """The result fits into memory that the decode has freed, or there is room besides. Core decodes a batch in
        parts if its estimate exceeds the free memory; finished parts on the GPU would reduce that memory.
        """
        if self.latent_dim == 2 and samples_in.ndim == 5:  # core decodes the first frame
            samples_in = samples_in[:, :, 0]
        estimate = self.memory_used_decode(samples_in.shape, self.vae_dtype)
        is_after_decode = not getattr(self.first_stage_model, "comfy_has_chunked_io", False)
        finished = self._finished_bytes(samples_in)
        # Core's estimates are up to twice the memory that a decode takes.
        if samples_in.shape[0] == 1 and is_after_decode and finished <= estimate / 4:
            return True
        weights = self.patcher.model_size() - self.patcher.loaded_size()
        needed = samples_in.shape[0] * estimate + finished + weights
        return bool(needed <= comfy.model_management.get_free_memory(self.device))

    def _finished_bytes(self, samples_in: torch.Tensor) -> int:
        """Bytes of two float32 copies of the result: core makes the pixels, and copies them into the batch's result."""
        batch, _, *sizes = samples_in.shape
        ratio = self.upscale_ratio
        ratios = ratio if isinstance(ratio, tuple) else (ratio,) * len(sizes)
        pixels = [by(size) if callable(by) else by * size for by, size in zip(ratios, sizes, strict=False)]
        # A Wan decoder that doubles width and height returns 12 channels; a node turns them into pixels.
        channels = max(self.output_channels, getattr(self, "conv_out_channels", 0))
        return int(2 * 4 * batch * channels * math.prod(pixels))
