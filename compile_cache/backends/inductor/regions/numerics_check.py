"""Compare the results of compiled code with the results of the original block.

First compare in the model's dtype. If a difference exceeds plain rounding, compute a reference in higher precision:
compiled code is correct if it is about as near to the reference as the original is.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from ....errors import NotComparedError, excerpt
from ....modules.gguf_loras import has_room
from ....modules.region_weights import weight_inputs, weight_slots, weights_from_inputs
from ....modules.site import RegionSite
from ....modules.skeleton import skeleton_of
from ....torch_compat.flags import uses_tf32
from ....torch_compat.out_of_memory import is_out_of_memory
from ....torch_compat.private_names import pytree
from ..lower.compiled_region import CompiledRegion

logger = logging.getLogger(__name__)

# Errors up to this are surely rounding, relative to the block's change of its input; by its coarsest input dtype.
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}
_TF32_TOLERANCE = 5e-3  # float32 on NVIDIA: by default convolutions round their inputs to 10 bits
_DOUBTFUL = 4  # multiple of the tolerance that counts as rounding if there is no reference in higher precision
# A quantizer of few bits amplifies rounding before it: two correct 4-bit results differ by up to 8e-2.
_QUANTIZED_TOLERANCE = 2e-1
_DECODED_TOLERANCE = 2e-2  # packs decode GGUF weights in float16, compiled code in float32
_OF_ONE = 3  # tolerance of a single row or column, as a multiple of the whole result's
_AS_FAR = 6  # compiled code may be this many times as far from the reference as the original
# Rounding has no direction, so a common factor of the whole result has a tighter bound: these shares of both terms.
_OF_TOLERANCE, _OF_STEPS = 1 / 3, 1 / 16

_HELD = 32  # elements that a block may allocate at once for each element of its inputs
_PART = 1 << 23  # elements compared at once: some 0.3 GB of float32 and float64
_FEW = "too few values are finite"


def difference_from_original(
    compiled: CompiledRegion,
    site: RegionSite,
    weights: Sequence[torch.Tensor],
    tensors: Sequence[torch.Tensor],
    cancellations: tuple[type[BaseException], ...] = (),
) -> str | None:
    """Compare `compiled` with the original on these inputs. Returns the difference as text; None if they agree.

    Raises the original's own errors; `cancellations` and out-of-memory errors, which do not mean that the code is
    wrong; NotComparedError if too few values are finite.
    """
    expected = pytree.tree_leaves(run_original(site, tensors))
    with torch.no_grad():
        try:
            actual = pytree.tree_leaves(compiled(weights, tensors))
        except Exception as error:
            if is_out_of_memory(error) or isinstance(error, cancellations):
                raise
            return f"it fails: {error}"
    dtype = max((each.dtype for each in (*tensors, *weights)), key=lambda dtype: _TOLERANCE.get(dtype, 0.0))
    tolerance = _tolerance(dtype, tensors[0].device)
    why = difference(actual, expected, tensors, tolerance)
    if why is not None:
        precise = [] if compiled.quantized else _precise(site, tensors, dtype, cancellations)
        least = _QUANTIZED_TOLERANCE if any(product for _, product in compiled.quantized) else _DECODED_TOLERANCE
        doubtful = max(_DOUBTFUL * tolerance, least if compiled.quantized else 0.0)
        why = difference(actual, expected, tensors, tolerance if precise else doubtful, precise)
    if why == _FEW:
        raise NotComparedError(f"{site.kind} cannot be compared yet: {_FEW}")
    return why


def value_difference(actual: Sequence[Any], expected: Sequence[Any], tensors: Sequence[torch.Tensor]) -> str:
    """Compare two results of the same operators on the inputs `tensors`. Returns the difference as text, or "".

    On a CPU compare bit for bit; on a GPU up to rounding, because it may choose another kernel for a tensor at another
    address.
    """
    if all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else a is b
        for a, b in zip(actual, expected, strict=True)
    ):
        return ""
    tolerance = _tolerance(tensors[0].dtype, tensors[0].device)
    return (difference(actual, expected, tensors, tolerance) or "") if tensors[0].is_cuda else "other bits"


def run_original(site: RegionSite, tensors: Sequence[torch.Tensor]) -> Any:
    """Run the block's own code on copies of its inputs, because it may write to them."""
    with torch.no_grad():
        return site.function(site.module, *[tensor.clone() for tensor in tensors])


def difference(
    actual: Sequence[Any],
    expected: Sequence[Any],
    tensors: Sequence[torch.Tensor],
    tolerance: float,
    precise: Sequence[Sequence[Any]] = (),
) -> str | None:
    """Compare results for the inputs `tensors`. Returns the difference as text; None if rounding explains it.

    precise: see `_precise`. With it, the distance of `expected` from the reference sets the bound.
    """
    actual, expected, tensors, *precise = (_as_real(each) for each in (actual, expected, tensors, *precise))
    for number, (a, b) in enumerate(zip(actual, expected, strict=True)):
        if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):  # a block may also return None
            if a != b:
                return f"{excerpt(a)} instead of {excerpt(b)}"
            continue
        if a.shape != b.shape:
            return f"shape {tuple(a.shape)} instead of {tuple(b.shape)}"
        target, right = b, []
        if precise:
            result, shaken = (each[number] for each in precise)
            right = [b, shaken]
            target = torch.where(torch.isfinite(a) | torch.isfinite(b), result, b)  # both non-finite: must agree
        same = [each for each in tensors if each.shape == b.shape and each.device == b.device]
        for base in (torch.zeros((), device=b.device).expand(b.shape), *same) if b.numel() else ():
            why = _compare_to_base(base, a, target, right, tolerance)
            if why == _FEW and any(torch.equal(b, each) and torch.equal(a, each) for each in same):
                continue  # a mask that the block returns unchanged
            if why is not None:
                return why
    return None


def _as_real(results: Sequence[Any]) -> list[Any]:
    is_complex = [isinstance(each, torch.Tensor) and each.is_complex() for each in results]
    return [torch.view_as_real(each) if here else each for each, here in zip(results, is_complex, strict=True)]


def _compare_to_base(
    base: torch.Tensor, actual: torch.Tensor, expected: torch.Tensor, right: Sequence[torch.Tensor], tolerance: float
) -> str | None:
    """Compare the differences to `base`. right: results that are as correct as `expected`.

    Bounds are relative to the difference, plus rounding steps of the result's dtype: as measured, a correct result
    reaches 0.4 of its bound, a row 0.6.
    """
    step = torch.finfo(actual.dtype).eps if actual.is_floating_point() else 0.0
    step *= max(tolerance / _TOLERANCE.get(actual.dtype, tolerance), 1.0)
    groups, tally = _norms(actual, expected, base)
    others, agrees = [_norms(each, expected, base) for each in right], tally[0] == 0
    all_groups = zip((_OF_ONE, _OF_ONE, 1), groups, *[each for each, _ in others], strict=True)
    for spare, (error, added, result), *more in all_groups:
        rounding = spare * (tolerance * added + step * result)
        for own, _, _ in more:
            rounding += _AS_FAR * (own - step * result).clamp(min=0)
        agrees &= (error <= (rounding + rounding.median()) / 2).all()
    factor = _OF_TOLERANCE * tolerance * added + _OF_STEPS * step * result
    agrees &= tally[2].abs() <= (factor * added).sum() + _AS_FAR * sum(each[2].abs() for _, each in others)
    is_right, finite, size, scale = torch.stack([agrees, tally[1], error[0], added[0]]).tolist()
    if finite * 2 < actual.numel():
        return _FEW
    return None if is_right else f"error {size:.3g} at norm {scale:.3g}"


def _norms(actual: torch.Tensor, expected: torch.Tensor, base: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Returns L2 norms over the finite values, as three float64 tensors: by row (3, rows), by column (3, columns) and
    of the whole (3, 1), for the error, for `expected - base` and for `expected`. Then a tensor of three sums: values
    finite in only one result, finite values of `expected`, and the error times `expected - base`.

    Near the largest value of its dtype a correct result may overflow or not.
    """
    largest = torch.finfo(actual.dtype).max if actual.is_floating_point() else 0.0
    dtype = torch.promote_types(torch.promote_types(actual.dtype, expected.dtype), torch.float32)
    rows: list[torch.Tensor] = []
    columns: list[torch.Tensor] = []
    tally: list[torch.Tensor] = []
    for parts in zip(*[_parts(each) for each in (actual, expected, base)], strict=True):
        a, b, x = (each.reshape(each.shape or (1,)).to(dtype) for each in parts)
        known, near = a.isfinite() & b.isfinite(), a.clamp(-largest, largest) - b.clamp(-largest, largest)
        wrong = ~(known | (near.abs() <= largest / 16) | (a.isnan() & b.isnan()))
        counts = [wrong.sum(), b.isfinite().sum()]
        error, added = torch.where(known, a - b, 0.0), torch.where(known & x.isfinite(), b - x, 0.0)
        b = torch.where(known, b, 0.0)
        for found, dims in ((rows, (-1,)), (columns, tuple(range(b.ndim - 1)))):
            norms = [
                torch.linalg.vector_norm(each, dim=dims or None, dtype=torch.float64) for each in (error, added, b)
            ]
            found.append(torch.stack(norms).reshape(3, -1))
        tally.append(torch.stack([*counts, (error.double() * added).sum()]))
    every = torch.cat(rows, 1)
    return [every, torch.cat(columns, 1), every.norm(dim=1, keepdim=True)], torch.stack(tally).sum(0)


def _parts(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """Split a tensor into views: float64 copies of a decoder's largest tensor would need gigabytes at once."""
    if tensor.numel() <= _PART:
        return [tensor]
    longest = max(range(tensor.ndim), key=lambda dim: tensor.shape[dim])
    return torch.split(tensor, max(_PART * tensor.shape[longest] // tensor.numel(), 1), longest)


def _precise(
    site: RegionSite,
    tensors: Sequence[torch.Tensor],
    dtype: torch.dtype,
    cancellations: tuple[type[BaseException], ...],
) -> list[list[Any]]:
    """The reference: the block's results in float32, or in float64 if its coarsest dtype is float32. Then its results
    for inputs that are off by a few float32 steps, which show how cancellation amplifies rounding. Empty if the code
    does not run in that dtype, or memory is short. Runs a copy of the module, because its code may keep tensors on it.
    """
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else torch.float64
    weights = weight_inputs(weight_slots(site.module, site.without))
    size = sum(each.numel() for each in weights) + _HELD * sum(each.numel() for each in tensors)
    if not has_room(tensors[0].device, wide.itemsize * size):
        return []

    def given(each: torch.Tensor) -> torch.Tensor:
        return each.to(wide, copy=True) if each.is_floating_point() else each.clone()

    try:
        generator = torch.Generator(tensors[0].device).manual_seed(0)  # the sampler uses the global generator
        results, module = [], skeleton_of(site.module)
        with torch.no_grad(), weights_from_inputs(module, site.without, [given(each) for each in weights]):
            for step in (0.0, 4 * torch.finfo(torch.float32).eps):
                inputs = [given(each) for each in tensors]
                for each in inputs:
                    if step and each.is_floating_point():
                        each *= 1 + step * torch.randn(each.shape, generator=generator, device=each.device, dtype=wide)
                results.append(pytree.tree_leaves(site.function(module, *inputs)))
        return results
    except Exception as error:
        if isinstance(error, cancellations):
            raise
        logger.debug("Resolute: %s does not run in %s", site.kind, wide, exc_info=True)
        return []


def _tolerance(dtype: torch.dtype, device: torch.device) -> float:
    if device.type == "cuda" and dtype is torch.float32 and uses_tf32():
        return _TF32_TOLERANCE
    return _TOLERANCE.get(dtype, _TOLERANCE[torch.float32])
