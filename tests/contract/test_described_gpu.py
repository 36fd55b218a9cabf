"""Worker processes that compile for a GPU which they do not see, and so hold no CUDA context on it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from compile_cache.backends.inductor.parallel import described_gpu
from scripts.support.places import ROOT

H200 = {
    "name": "NVIDIA H200", "major": 9, "minor": 0, "total_memory": 150_000_000_000, "multi_processor_count": 132,
    "regs_per_multiprocessor": 65536, "max_threads_per_multi_processor": 2048, "max_threads_per_block": 1024,
    "warp_size": 32, "shared_memory_per_block": 49152, "shared_memory_per_block_optin": 232448,
    "shared_memory_per_multiprocessor": 233472, "L2_cache_size": 62914560, "is_integrated": 0,
}  # fmt: skip

pytestmark = [
    pytest.mark.skipif(not described_gpu.is_possible(), reason="with this torch, workers use the GPU"),
    pytest.mark.skipif(sys.platform != "linux", reason="Triton's compiler for NVIDIA is tested on Linux"),
]

# Stands for the main process, which has no GPU here either: it traces the block over fake weights.
PROGRAM = """
import json, sys
import torch
from compile_cache.backends.inductor.compile import tracing
from compile_cache.backends.inductor.parallel import described_gpu, job, pool
from compile_cache.torch_private import FakeTensorMode
from tests.contract.rig import Convolution, original

gpu, out = json.loads(sys.argv[1]), sys.argv[2]
device = torch.device("cuda", 0)
described_gpu.use(gpu, 0)
pool.gpu_description = lambda device: gpu
block = Convolution(16).half().eval()
with FakeTensorMode():
    for module in block.modules():
        for name, weight in module._parameters.items():
            fake = torch.empty(weight.shape, dtype=weight.dtype, device=device)
            module._parameters[name] = torch.nn.Parameter(fake, requires_grad=False)
    inputs = [torch.empty(2, 16, 32, 24, dtype=torch.half, device=device)]
sizes = tracing.bind_dims(block.dims, [tuple(each.shape) for each in inputs])
traced = tracing.trace(original, block, inputs, block.dims, tracing.general_hints(sizes, device))
workers = pool.WorkerPool()
workers.prepare(2, device)
jobs = [(0, job.job_of("key" * 8, "Convolution", traced))]
found = [each for each in workers.results(jobs, job.settings_for(device)) if each is not None]
workers.close()
((_, artifact, _),) = found
assert not isinstance(artifact, str), artifact
open(out, "wb").write(artifact.payload)
assert not torch.cuda.is_initialized()
"""

# In a process of its own: the graph's classes are those of inductor.
KERNELS = """
import io, pickle, sys, zipfile
from pathlib import Path
from compile_cache.backends.inductor.parallel.described_gpu import registers
import torch._inductor.output_code

container = zipfile.ZipFile(sys.argv[1])
bundle = pickle.loads(container.read("graph.pickle"))._triton_bundle
for number, binary in enumerate(
    file.payload for kernel in bundle.kernel_artifacts for file in kernel.artifacts if file.filename.endswith(".cubin")
):
    Path(sys.argv[2], f"{number}.cubin").write_bytes(binary)
    print(number, registers(binary))
"""


def run(program: str, *arguments: object) -> str:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def payload(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("described") / "payload.zip"
    run(PROGRAM, json.dumps(H200), out)
    return out


def test_a_worker_compiles_kernels_for_a_gpu_that_it_does_not_see(payload: Path, tmp_path: Path) -> None:
    counts = [int(line.split()[1]) for line in run(KERNELS, payload, tmp_path).splitlines()]
    assert len(counts) >= 2
    assert all(8 <= count <= 255 for count in counts)


def test_registers_are_those_that_nvidias_tool_finds(payload: Path, tmp_path: Path) -> None:
    import triton  # type: ignore[import-untyped]

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.is_file():
        pytest.skip("this Triton brings no cuobjdump")
    for line in run(KERNELS, payload, tmp_path).splitlines():
        number, count = line.split()
        shown: Any = subprocess.run(
            [tool, "-res-usage", tmp_path / f"{number}.cubin"], capture_output=True, text=True, check=True
        )
        assert f"REG:{count} " in shown.stdout + shown.stderr
