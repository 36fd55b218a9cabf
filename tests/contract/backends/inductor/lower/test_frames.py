"""Maps of videos that a compiled region pads and puts together: torch's own results, with the channels last."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from benchmarks.cards import description
from compile_cache.backends.inductor.lower import frames
from compile_cache.backends.inductor.lower.decompositions import decompositions

from .....programs import run_python
from ....rig import random
from ..described import needs_descriptions


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "_is_map", lambda tensor: tensor.ndim == 5 and frames.is_channels_last(tensor))


def maps(*shape: int) -> torch.Tensor:
    return random(*shape).contiguous(memory_format=torch.channels_last_3d)


def traced(function: Any, *given: torch.Tensor) -> torch.fx.GraphModule:
    with torch.no_grad():
        graph: torch.fx.GraphModule = make_fx(function, decompositions(), tracing_mode="symbolic")(*given)
    return graph


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize(
    "padding", [(1, 1, 1, 1, 2, 0), (2, 0, 0, 1, 0, 3), (0, 0, 0, 0, 1, 0), (-1, 1, 0, 0, 0, 0)], ids=str
)
@pytest.mark.parametrize("shape", [(1, 8, 3, 5, 7), (2, 3, 1, 4, 3)], ids=str)
def test_a_map_is_padded_as_torch_does(padding: tuple[int, ...], shape: tuple[int, ...]) -> None:
    def padded(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(x, padding, mode="replicate")

    graph = traced(padded, maps(*shape))
    larger = shape if 1 in shape[2:] else (*shape[:2], *(size + 2 for size in shape[2:]))  # a trace of 1 is for 1 alone
    for given in (maps(*shape), maps(*larger)):
        result = graph(given)
        assert torch.equal(result, padded(given))
        assert result.is_contiguous(memory_format=torch.channels_last_3d)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("batch", [1, 2])
def test_maps_are_put_together_as_torch_does(batch: int) -> None:
    def together(before: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([before, x], 2)

    before, x = maps(batch, 8, 2, 5, 7), maps(batch, 8, 3, 5, 7)
    result = traced(together, before, x)(before, x)
    assert torch.equal(result, together(before, x))
    assert result.is_contiguous(memory_format=torch.channels_last_3d)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_five_dimensions_that_are_no_map_stay_as_they_lie() -> None:
    def flat(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return torch.cat([q, k], 2).view(q.shape[0], q.shape[1] * 2, -1)

    q, k = random(2, 5, 1, 4, 8), random(2, 5, 1, 4, 8)
    assert torch.equal(traced(flat, q, k)(q, k), flat(q, k))


def test_elsewhere_torch_does_it() -> None:
    x = random(1, 4, 2, 3, 5)
    of_channels = [x, random(1, 2, 2, 3, 5)]
    table = decompositions()
    assert torch.equal(
        table[frames.PAD](x, [1, 1, 0, 2, 1, 0]), torch.ops.aten.replication_pad3d(x, [1, 1, 0, 2, 1, 0])
    )
    assert table[frames.CAT](of_channels, 1) is NotImplemented  # torch's own decomposition leaves it as it is


# Prints, of a block with norms on a described card: the strides over channels of what its convolutions give, or take
# where inductor checks no result (torch 2.15), and the shapes of maps that are contiguous, and of those in fp32.
COMPILE = r"""
import json, re, sys
import torch
from compile_cache.backends.inductor.compiler import described_gpu
described_gpu.install_fake_gpu(json.loads(sys.argv[1]))
from torch._inductor import config
from torch._inductor.codecache import PyCodeCache
config.compile_threads, config.fx_graph_cache = 1, False
from compile_cache.backends.inductor.lower.lowering import compile_trace
from compile_cache.backends.inductor.lower.tracing import bind_dims, trace

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (torch.nn.Conv3d(32, 32, (3, 3, 3)) for _ in "abc")
        self.norm = torch.nn.GroupNorm(8, 32)

    def carrying(self, convolution, x, before):
        h = torch.nn.functional.silu(torch.nn.functional.normalize(x, dim=1) * self.norm.weight.view(32, 1, 1, 1))
        h = torch.nn.functional.pad(h, (1, 1, 1, 1, 0, 0), mode="replicate")
        return convolution(torch.cat([before, h], 2))

    def forward(self, x, before):
        h = self.carrying(self.second, self.carrying(self.first, x, before), before)
        h = torch.nn.functional.silu(self.norm(h))
        return self.third(torch.nn.functional.pad(h, (1, 1, 1, 1, 2, 0), mode="replicate"))

dtype = getattr(torch, sys.argv[2])
with torch._subclasses.FakeTensorMode():
    x, before = (torch.empty(1, 32, *sizes, dtype=dtype, device="cuda:0") for sizes in ((3, 8, 8), (2, 10, 10)))
dims = [("b", None, "t", "h", "w"), ("b", None, None, "h of carried", "w of carried")]
made = trace(lambda block, *given: block(*given), Block().to("meta", dtype), [x, before], dims,
             bind_dims(dims, [x.shape, before.shape]))
compile_trace(made)
text = open(PyCodeCache.modules[-1].__file__).read()
checks = re.findall(r"assert_size_stride\(buf\d+, [(].*?[)], ([(].*?[)]), 'torch.ops.aten.convolution", text)
checks = checks or re.findall(r"convolution\(reinterpret_tensor\(buf\d+, [(].*?[)], ([(].*?[)]), 0\)", text)
buffers = re.findall(r"empty_strided_cuda\([(](.*?)[)], [(](.*?)[)], torch.(\w+)", text)
maps = [(shape.split(", "), strides.split(", "), kind) for shape, strides, kind in buffers if shape.count("s") > 2]
contiguous = [shape for shape, strides, _ in maps if len(shape) == 5 and shape[1] == "32" and strides[-1] == "1"]
in_fp32 = [shape for shape, _, kind in maps if kind == "float32" and "32" in shape]
print(json.dumps([[check.split(", ")[1] for check in checks], contiguous, in_fp32]))
"""


@needs_descriptions
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_on_a_gpu_every_convolution_over_frames_is_channels_last(dtype: str) -> None:
    printed = run_python(COMPILE, json.dumps(description("sm_90")), dtype, CUDA_VISIBLE_DEVICES="")
    channel_strides, contiguous, in_fp32 = json.loads(printed.splitlines()[-1])
    assert channel_strides == ["1", "1", "1"]
    assert not contiguous
    assert not in_fp32
