"""Compare the results of compiled code with those of the original block, with a tolerance for rounding."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from ....errors import excerpt
from ....regions.gguf_weights import LAYOUT as GGUF_LAYOUT
from ....regions.site import RegionSite
from ....torch_facts.flags import uses_tf32
from ....torch_facts.out_of_memory import is_out_of_memory
from ....torch_facts.private_names import pytree
from ..compile.compiled_region import CompiledRegion

# Relative error between a region and its original that rounding explains, by dtype of the result.
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
# Rounding in front of a quantizer of few bits is amplified: two right results of 4 bits differ by up to 8e-2.
_QUANTIZED_TOLERANCE = 2e-1
_DECODED_TOLERANCE = _TOLERANCE[torch.float16]  # packs decode GGUF weights in float16, compiled code in float32
_TF32_TOLERANCE = 5e-3  # float32 on NVIDIA: by default convolutions round their inputs to 10 bits

# Where inputs cancel, only rounding noise is left, so allow an absolute tolerance, as a part of the norm of the inputs.
# A normalisation of equal values divides that noise by the root of its epsilon (1e-6).
_NOISE = 1000 * torch.finfo(torch.float32).eps

_PART = 1 << 22  # elements that are compared at once


def difference_from_original(
    compiled: CompiledRegion,
    site: RegionSite,
    weights: Sequence[torch.Tensor],
    tensors: Sequence[torch.Tensor],
    cancellations: tuple[type[BaseException], ...] = (),
) -> str | None:
    """Compare `compiled` with the original on these inputs. Returns the difference for people; None if they agree.

    Raises what the original raises; `cancellations` and a lack of memory, which do not mean that the code is
    wrong.
    """
    expected = pytree.tree_leaves(run_original(site, tensors))
    with torch.no_grad():
        try:
            actual = pytree.tree_leaves(compiled(weights, tensors))
        except Exception as error:
            if is_out_of_memory(error) or isinstance(error, cancellations):
                raise
            return f"it fails: {error}"
    least = _least_tolerance(compiled.quantized)
    return difference(actual, expected, tensors, least)


def difference(
    actual: Sequence[Any], expected: Sequence[Any], tensors: Sequence[torch.Tensor], least: float = 0.0
) -> str | None:
    """Compare results for the inputs `tensors`. Returns the difference for people; None if rounding explains it.

    least: a relative error that is always allowed.
    """
    noise = max(float(_norm(tensor)) for tensor in tensors) * _NOISE
    for a, b in zip(actual, expected, strict=True):
        if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):  # a block may also return None
            if a != b:
                return f"{excerpt(a)} instead of {excerpt(b)}"
            continue
        if a.shape != b.shape:
            return f"shape {tuple(a.shape)} instead of {tuple(b.shape)}"
        scale, error_norm = _norm(b), _error(a, b)
        if not bool(error_norm <= max(_tolerance(b), least) * scale + noise):
            return f"error {float(error_norm):.3g} at norm {float(scale):.3g}"
    return None


def _least_tolerance(quantized: Collection[tuple[str, str]]) -> float:
    """quantized: see `Trace.quantized`."""
    if any(product for _, product in quantized):
        return _QUANTIZED_TOLERANCE
    return _DECODED_TOLERANCE if any(layout.startswith(GGUF_LAYOUT) for layout, _ in quantized) else 0.0


def run_original(site: RegionSite, tensors: Sequence[torch.Tensor]) -> Any:
    """The result of the block's own code. It gets copies, because it may write to its inputs."""
    with torch.no_grad():
        return site.function(site.module, *[tensor.clone() for tensor in tensors])


def _error(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """The norm of the difference where `expected` is finite: where the original overflows, compiled code may too."""
    parts = []
    for a, b in zip(_parts(actual), _parts(expected), strict=True):
        finite = torch.isfinite(b)
        parts.append((a[finite].float() - b[finite].float()).norm())
    norm: torch.Tensor = torch.stack(parts).norm()
    return norm


def _norm(tensor: torch.Tensor) -> torch.Tensor:
    """The L2 norm over the finite values."""
    norm: torch.Tensor = torch.stack([part[torch.isfinite(part)].float().norm() for part in _parts(tensor)]).norm()
    return norm


def _parts(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """Views that are the whole tensor together. float32 copies of a decoder's largest tensor would take gigabytes."""
    if tensor.numel() <= _PART:
        return [tensor]
    longest = max(range(tensor.ndim), key=lambda dim: tensor.shape[dim])
    return torch.split(tensor, max(_PART * tensor.shape[longest] // tensor.numel(), 1), longest)


def _tolerance(result: torch.Tensor) -> float:
    if result.is_cuda and result.dtype is torch.float32 and uses_tf32():
        return _TF32_TOLERANCE
    return _TOLERANCE.get(result.dtype, _TOLERANCE[torch.float32])
