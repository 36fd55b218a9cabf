"""Attention by shape on a GPU: right with every mask and with grouped heads, also in captures and after a restart."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from compile_cache.attention.chooser import Chooser
from compile_cache.attention.kernels import AttentionArgs, torch_attention
from compile_cache.attention.timing import seconds_of
from compile_cache.backends.cuda_graphs.capture import capture
from compile_cache.errors import CaptureError

HALF, BF16 = torch.float16, torch.bfloat16
# Batch, heads of q, of k and v, tokens of q, of k, width, dtype.
SHAPES = {
    "Flux": (1, 24, 24, 1536, 1536, 128, BF16),
    "SDXL": (2, 10, 10, 1024, 1024, 64, HALF),
    "SDXL, text": (2, 20, 20, 529, 77, 64, HALF),
    "SD1.5, wide": (2, 8, 8, 256, 256, 160, HALF),
    "odd": (3, 6, 6, 153, 131, 64, BF16),
    "grouped": (1, 32, 8, 640, 640, 128, BF16),
    "float32": (1, 4, 4, 200, 200, 64, torch.float32),
}
MASKS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor | None]] = {
    "none": lambda q, k: None,
    "keys, bool": lambda q, k: (torch.arange(k.shape[2], device=q.device) < k.shape[2] - 5)[None, None, None],
    "whole, bool": lambda q, k: torch.rand(q.shape[0], 1, q.shape[2], k.shape[2], device=q.device) < 0.8,
    "whole, numbers": lambda q, k: torch.randn(1, 1, q.shape[2], k.shape[2], device=q.device, dtype=q.dtype),
    "heads, numbers": lambda q, k: torch.randn(*q.shape[:3], k.shape[2], device=q.device, dtype=q.dtype),
    "LTX": lambda q, k: torch.zeros(1, 1, 1, k.shape[2], device=q.device, dtype=q.dtype).index_fill_(
        3, torch.arange(k.shape[2] // 2, device=q.device), torch.finfo(q.dtype).min
    ),
    "a masked row": lambda q, k: torch.ones(
        1, 1, q.shape[2], k.shape[2], device=q.device, dtype=torch.bool
    ).index_fill_(2, torch.arange(3, device=q.device), False),
}


@pytest.fixture(autouse=True)
def _inference() -> Any:
    with torch.inference_mode():
        yield


def given(shape: str, mask: str) -> AttentionArgs:
    batch, heads, groups, tokens, context, width, dtype = SHAPES[shape]
    like: dict[str, Any] = {"device": "cuda", "dtype": dtype}
    q = torch.randn(batch, tokens, heads, width, **like).transpose(1, 2)
    k, v = (torch.randn(batch, context, groups, width, **like).transpose(1, 2) for _ in range(2))
    return AttentionArgs(q, k, v, MASKS[mask](q, k), None, heads != groups)


def exact(call: AttentionArgs) -> torch.Tensor:
    """In float32, as (batch, tokens, heads, width); numbers of a wholly masked row are 0."""
    q, k, v = (each.float() for each in call[:3])
    k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], 1) for each in (k, v))
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if call.mask is not None:
        is_bool = call.mask.dtype is torch.bool
        scores = scores.masked_fill(~call.mask, float("-inf")) if is_bool else scores + call.mask.float()
    return (scores.softmax(-1).nan_to_num() @ v).transpose(1, 2)


def distance(found: torch.Tensor, right: torch.Tensor) -> float:
    return float((found.float() - right).norm() / right.norm())


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_chosen_kernel_is_as_near_to_float32_as_torchs(shape: str, mask: str) -> None:
    chooser, call = Chooser(), given(shape, mask)
    found = chooser(call)
    (choice,) = chooser.report()
    print(shape, mask, choice["kernel"], choice["milliseconds"], choice["failed"])
    right, torchs = exact(call), torch_attention(call).transpose(1, 2)
    assert found.is_contiguous()
    assert torch.isfinite(found).all() or not torch.isfinite(torchs).all()
    ours, theirs = (distance(each.nan_to_num(), right) for each in (found, torchs))
    assert ours <= 1.5 * theirs + 1e-5, (ours, theirs, choice)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shape", ["Flux", "SDXL, text", "grouped"])
def test_a_capture_runs_the_chosen_kernel(shape: str, mask: str) -> None:
    chooser, call = Chooser(), given(shape, mask)
    tensors = [each for each in call[:4] if each is not None]

    def invoke(tensors: Any) -> torch.Tensor:
        return chooser(call._replace(**dict(zip("qkv", tensors[:3], strict=True)), mask=(*tensors, None)[3]))

    graph = capture(invoke, tensors, invoke(tensors))
    for _ in range(2):
        others = [each if each.dtype is torch.bool else torch.randn_like(each) for each in tensors]
        assert torch.equal(graph.replay(others).nan_to_num(), invoke(others).nan_to_num())
    graph.close()


def test_a_shape_that_is_new_within_a_capture_refuses_it_and_nothing_else() -> None:
    chooser, call = Chooser(), given("SDXL", "none")
    tensors = list(call[:3])
    with pytest.raises(CaptureError, match="could not be measured"):
        capture(lambda given: chooser(AttentionArgs(*given)), tensors, torch_attention(call), rehearse=False)
    assert chooser.report() == []
    torch.randn(8, device="cuda")
    torch.cuda.synchronize()


def test_the_next_process_measures_nothing_and_computes_the_same(tmp_path: Path) -> None:
    measured: list[float] = []

    def counted(run: Callable[[], object], device: torch.device) -> float:
        measured.append(seconds_of(run, device))
        return measured[-1]

    call = given("Flux", "none")
    results, counts = [], []
    for _ in range(2):
        chooser = Chooser(counted)
        chooser.use(tmp_path, lambda text: contextlib.nullcontext())
        results.append(chooser(call))
        counts.append(len(measured))
    assert counts[0] == counts[1] > 1
    assert torch.equal(*results)
    neighbour = given("Flux", "none")
    chooser(neighbour._replace(q=neighbour.q[:, :, :1200], k=neighbour.k[:, :, :1200], v=neighbour.v[:, :, :1200]))
    assert len(measured) == counts[0], "a shape within a factor of two was measured"
