"""Workers compile for a GPU that no process sees. Here the main process has a described one too."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.cards import description
from compile_cache.backends.inductor.compiler import described_gpu, job, process
from compile_cache.backends.inductor.compiler.failures import NeedsGpuError, OtherEnvironmentError
from compile_cache.torch_compat.private_names import inductor_config

from .....programs import run_python
from ..described import needs_descriptions

CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")


# Prints of each kernel: its name, and the capability that its binary is for.
COMPILE = """
import io, json, pickle, struct, sys, zipfile
import torch
from benchmarks.cards import description
from compile_cache.backends.inductor.compiler import described_gpu, job, process
from compile_cache.backends.inductor.compiler.failures import NeedsGpuError, OtherEnvironmentError
card, dtype = json.loads(sys.argv[1]), getattr(torch, sys.argv[2])
described_gpu.install_fake_gpu(card)
from compile_cache.backends.inductor.lower.tracing import bind_dims, trace
from compile_cache.backends.inductor.compiler.job import job_of, settings_for
from compile_cache.backends.inductor.compiler.pool import WorkerPool

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.conv = torch.nn.GroupNorm(32, 64), torch.nn.Conv2d(64, 64, 3, padding=1)

    def forward(self, x):
        h = self.conv(torch.nn.functional.silu(self.norm(x))) + x
        return h * torch.full((1,), 0.5, device=x.device), h.flatten(1).sum(-1)

device = torch.device("cuda", card["index"])
with torch._subclasses.FakeTensorMode():
    x = torch.empty(2, 64, 64, 64, dtype=dtype, device=device)
dims = [("batch", None, "h", "w")]
traced = trace(lambda block, x: block(x), Block().to("meta", dtype), [x], dims, bind_dims(dims, [x.shape]))
pool = WorkerPool()
with pool.in_use(1, device):
    artifact, _ = pool.submit(job_of("0" * 64, "Block", traced, settings_for(device))).result(500)
pool.close()
stored = zipfile.ZipFile(io.BytesIO(artifact.payload)).read("graph.pickle")
files = [file for kernel in pickle.loads(stored)._triton_bundle.kernel_artifacts for file in kernel.artifacts]
binaries = [(file.filename, file.payload) for file in files if file.filename.endswith(".cubin")]
kinds = [json.loads(file.payload)["target"]["arch"] for file in files
         if file.filename.endswith(".json") and "__grp__" not in file.filename]
assert len(kinds) == len(binaries)
print(json.dumps([kinds, torch.cuda.is_initialized(), list(artifact.about["static"])]))
"""


@needs_descriptions
@pytest.mark.parametrize(("card", "index"), [("sm_90", 0), ("sm_75", 1)])
def test_a_worker_compiles_for_a_gpu_that_it_does_not_see(card: str, index: int) -> None:
    printed = run_python(COMPILE, json.dumps(description(card, index)), "float16", CUDA_VISIBLE_DEVICES="")
    kinds, is_initialised, static = json.loads(printed.splitlines()[-1])
    assert len(kinds) >= 3
    assert {f"sm_{kind}" for kind in kinds} == {card}
    assert not is_initialised
    assert static == [[0, 64, 0, 0]]


@needs_descriptions
def test_what_inductors_own_cache_holds_already_is_kept_too(tmp_path: Path) -> None:
    variables = {"CUDA_VISIBLE_DEVICES": "", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    first, second = [run_python(COMPILE, json.dumps(description("sm_90")), "float16", **variables) for _ in range(2)]
    assert json.loads(first.splitlines()[-1]) == json.loads(second.splitlines()[-1])


def test_a_gpu_is_described_in_plain_types(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(**description("sm_90"), uuid=object(), method=print)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert described_gpu.describe(torch.device("cuda", 3)) == description("sm_90", 3)


KERNEL = """
.version 8.0
.target sm_90
.address_size 64
.visible .entry add(.param .u64 a, .param .u64 b) {
    .reg .b64 %p<5>; .reg .f32 %f<65>; .reg .b32 %r<2>;
    ld.param.u64 %p1, [a]; ld.param.u64 %p2, [b]; mov.u32 %r1, %tid.x; mul.wide.u32 %p3, %r1, 4;
    add.s64 %p1, %p1, %p3; add.s64 %p2, %p2, %p3;
LOADS
ADDS
    ret;
}
"""


@pytest.mark.parametrize(("count", "most"), [(1, 255), (60, 255), (60, 24)])
def test_registers_and_stack_of_a_binary_are_those_that_the_assembler_tells(
    tmp_path: Path, count: int, most: int
) -> None:
    found = importlib.util.find_spec("triton")
    assert found is not None
    assert found.origin is not None
    assembler = Path(found.origin).parent / "backends" / "nvidia" / "bin" / "ptxas"
    loads = [f"    ld.volatile.global.f32 %f{n}, [%p1+{4096 * n}];" for n in range(count)]
    adds = [f"    st.volatile.global.f32 [%p2+{4096 * n}], %f{n};" for n in range(count)]
    source, binary = tmp_path / "add.ptx", tmp_path / "add.cubin"
    source.write_text(KERNEL.replace("LOADS", "\n".join(loads)).replace("ADDS", "\n".join(adds)))
    command = [str(assembler), "-v", "-arch=sm_90", f"-maxrregcount={most}", str(source), "-o", str(binary)]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    registers, stack = (re.search(text, told) for text in (r"Used (\d+) registers", r"(\d+) bytes stack frame"))
    assert registers is not None
    assert stack is not None
    expected = int(registers[1]), int(stack[1])
    assert (expected[1] > 0) == (count > most)
    assert described_gpu.registers_and_stack(SimpleNamespace(asm={"cubin": binary.read_bytes()})) == expected
    assert described_gpu.registers_and_stack(SimpleNamespace(cubin_path=str(binary))) == expected


def test_registers_and_stack_of_a_kernel_for_amd_are_read_from_its_text(tmp_path: Path) -> None:
    text = "    .private_segment_fixed_size: 48\n    .vgpr_count:     96\n"
    (tmp_path / "kernel.amdgcn").write_text(text)
    assert described_gpu.registers_and_stack(SimpleNamespace(asm={"amdgcn": text})) == (96, 48)
    assert described_gpu.registers_and_stack(SimpleNamespace(cubin_path=str(tmp_path / "kernel.hsaco"))) == (96, 48)


@needs_descriptions
def test_where_inductor_times_kernels_a_call_compiles_for_its_gpu_itself() -> None:
    assert [described_gpu.why_not(device) for device in (CPU, CUDA)] == ["", ""]
    with inductor_config.patch(max_autotune=True):
        assert described_gpu.why_not(CPU) == ""
        assert described_gpu.why_not(CUDA) == "inductor times kernels while it compiles (max_autotune)"


@pytest.mark.parametrize(
    "text", ["Found no NVIDIA driver on your system.", "No CUDA GPUs are available", "CUDA error: x"]
)
def test_a_worker_says_that_a_compile_needs_the_gpu(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    def refuse(*given: Any) -> Any:
        raise RuntimeError(text)

    monkeypatch.setattr(job, "_apply", lambda: None)
    monkeypatch.setattr(job, "_run", refuse)
    made, _ = job.work(vars(job.Job("key", "label", b"", (), True, {})))
    assert isinstance(made, str)
    assert type(process._error_of(made)) is NeedsGpuError


def test_a_torch_that_cannot_take_a_description_is_another_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(given: Any) -> None:
        raise AttributeError("no such function")

    monkeypatch.setattr(job.described_gpu, "install_fake_gpu", refuse)
    settings = {"device": "cuda:0", "card": description("sm_90"), "inductor": {}, "flags": {}, "environment": []}
    made, _ = job.work(vars(job.Job("key", "label", b"", (), True, settings)))
    assert isinstance(made, str)
    assert type(process._error_of(made)) is OtherEnvironmentError
