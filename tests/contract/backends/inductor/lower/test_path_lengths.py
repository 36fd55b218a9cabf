"""Triton's files have the names of kernels, and a path on Windows may have 259 characters."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.cards import description

from .....programs import run_python
from ..described import needs_descriptions

# A user's name of 20 characters, which inductor repeats; Triton writes into a folder of its own first.
CACHE = r"C:\Users\a-long-name-of-20-xx\AppData\Local\Temp\torchinductor_a-long-name-of-20-xx"
WHILE_WRITING = r"\tmp.pid_123456_01234567-89ab-cdef-0123-456789abcdef"
LIMIT = 259

# Prints the longest path of a file below the cache, without a kernel's group file.
COMPILE = """
import json, os, sys
from pathlib import Path
import torch
from compile_cache.backends.inductor.compiler import described_gpu
described_gpu.install_fake_gpu(json.loads(sys.argv[1]))
from compile_cache.backends.inductor.lower import lowering
from compile_cache.backends.inductor.lower.tracing import bind_dims, trace
lowering._IS_WINDOWS = sys.argv[2] == "win32"
torch._inductor.config.compile_threads = 1

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.RMSNorm(256)

    def forward(self, x):
        y = torch.nn.functional.leaky_relu(self.norm(x)) * torch.sigmoid(x) + torch.tanh(x).reciprocal()
        return torch.nn.functional.hardswish(y).clamp_min(0.1).log1p().exp().float().cumsum(-1).to(x.dtype)

with torch._subclasses.FakeTensorMode():
    x = torch.empty(2, 64, 256, dtype=torch.half, device="cuda:0")
dims = [("batch", "tokens", None)]
block, sizes = Block().to("meta", torch.half), bind_dims(dims, [x.shape])
lowering.compile_trace(trace(lambda block, x: block(x), block, [x], dims, sizes))
folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
files = [str(file.relative_to(folder)) for file in folder.rglob("triton_*") if file.is_file()]
assert files
print(max(files, key=len))
"""


@needs_descriptions
@pytest.mark.parametrize("platform", ["win32", "linux"])
def test_kernels_have_short_names_on_windows(tmp_path: Path, platform: str) -> None:
    variables = {"CUDA_VISIBLE_DEVICES": "", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    longest = run_python(COMPILE, json.dumps(description("sm_90")), platform, **variables).splitlines()[-1]
    length = len(f"{CACHE}\\{longest}{WHILE_WRITING}__grp__")
    assert (length <= LIMIT) == (platform == "win32"), longest
