"""Inductor starts no workers of its own: they import torch for ten seconds beside a prompt, and nothing needs them."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.cards import description

from .....programs import run_python
from ..described import needs_descriptions

# Prints how many pools there are after a compile of a kernel of Triton's, and after a load.
COMPILE_AND_LOAD = """
import json, sys
import torch
from torch._inductor.async_compile import AsyncCompile, CompiledTritonKernels
from compile_cache.backends.inductor.parallel import described_gpu
described_gpu.stand_in(json.loads(sys.argv[1]))
from compile_cache.backends.inductor.compile import artifacts, lowering
from compile_cache.backends.inductor.compile.tracing import bind_dims, trace

with torch._subclasses.FakeTensorMode():
    x = torch.empty(2, 64, 256, dtype=torch.half, device="cuda:0")
block, dims = torch.nn.RMSNorm(256).to("meta", torch.half), [("batch", "tokens", None)]
made = lowering.compile_trace(trace(lambda block, x: block(x), block, [x], dims, bind_dims(dims, [x.shape])))
print(AsyncCompile.process_pool.cache_info().currsize)
stored = artifacts.pack("key", "label", made)
torch._inductor.codecache.PyCodeCache.cache_clear()
CompiledTritonKernels.cache_clear()
assert artifacts.unpack(stored).kernels
print(AsyncCompile.process_pool.cache_info().currsize)
assert torch._inductor.config.decide_compile_threads() == 4
"""


@needs_descriptions
def test_inductor_starts_no_workers(tmp_path: Path) -> None:
    variables = {"CUDA_VISIBLE_DEVICES": "", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    card = json.dumps(description("sm_90"))
    printed = run_python(COMPILE_AND_LOAD, card, TORCHINDUCTOR_COMPILE_THREADS="4", **variables)
    assert printed.split() == ["0", "0"]
