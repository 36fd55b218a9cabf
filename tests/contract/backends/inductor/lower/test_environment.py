"""What makes compiled code invalid and what does not: each change of a table, one at a time.

The environment's fingerprint and a region's key together find a stored region. The first half changes what must not be
shared, the second half what must.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor import config as inductor_config

from compile_cache.backends.inductor.lower import environment
from compile_cache.backends.inductor.lower.environment import environment_of
from compile_cache.backends.inductor.regions.region import region_key
from compile_cache.modules.site import RegionSite
from compile_cache.modules.structure import structure_digest
from compile_cache.store.fingerprint import FORMAT_VERSION, EnvironmentFingerprint
from scripts.places import ROOT

from .....programs import run_python
from ....rig import CONTEXT, TOKENS, Attention, Model, original, seeded

DEVICES = {"cpu": torch.device("cpu"), "cuda": torch.device("cuda", 0)}
MATMUL, CUDNN = torch.backends.cuda.matmul, torch.backends.cudnn

Patch = pytest.MonkeyPatch
# Takes an empty folder; what it changes holds inside the `with`.
Change = Callable[[Path], AbstractContextManager[object]]


def forget() -> None:
    """What a process reads once."""
    environment._instructions.cache_clear()


@pytest.fixture(autouse=True)
def gpu(monkeypatch: Patch) -> Iterator[None]:
    """A GPU as torch reports it. The flags are torch's real ones; they exist without a GPU."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    forget()
    yield
    forget()


@contextmanager
def put(target: Any, name: str, value: object) -> Iterator[None]:
    """Torch's flags are no attributes that could be deleted, so they are set back."""
    before = getattr(target, name)
    setattr(target, name, value)
    try:
        yield
    finally:
        setattr(target, name, before)


def setting(target: Any, name: str, value: object) -> Change:
    return lambda _: put(target, name, value)


def package(name: str, version: str | None) -> Change:
    """Another version of a package, or None for no such package."""
    real = environment._version

    def fake_version(asked: str) -> str | None:
        return version if asked == name else real(asked)

    return setting(environment, "_version", fake_version)


def interpreter(**values: object) -> Change:
    here = {"version_info": sys.version_info, "platform": sys.platform}
    return setting(environment, "sys", SimpleNamespace(**{**here, **values}))


def processor(listed: str) -> Change:
    """Another /proc/cpuinfo."""

    def change(folder: Path) -> AbstractContextManager[None]:
        (folder / "cpuinfo").write_text(listed)
        there = environment._instructions(folder / "cpuinfo")
        return put(environment, "_instructions", lambda: there)

    return change


def inductor(**values: object) -> Change:
    named = {name.replace("__", "."): value for name, value in values.items()}
    return lambda _: inductor_config.patch(named)


# What changes -> (component of the fingerprint that says so, devices that it concerns, the change)
INVALIDATES: dict[str, tuple[str, str, Change]] = {
    "torch": ("torch", "cpu cuda", setting(torch, "__version__", "2.10.0+cu130")),
    "torch's build": ("torch", "cpu cuda", setting(torch, "__version__", f"{torch.__version__}.another")),
    "triton": ("triton", "cpu cuda", package("triton", "2.0.0")),
    "no triton": ("triton", "cpu cuda", package("triton", None)),
    "python's minor version": ("python", "cpu cuda", interpreter(version_info=SimpleNamespace(major=3, minor=99))),
    "operating system": ("platform", "cpu cuda", interpreter(platform="win32")),
    "machine type": ("platform", "cpu cuda", setting(environment.platform, "machine", lambda: "riscv")),
    "GPU": ("device", "cuda", setting(torch.cuda, "get_device_name", lambda device=None: "NVIDIA L4")),
    "GPU architecture": ("device", "cuda", setting(torch.cuda, "get_device_capability", lambda device=None: (8, 9))),
    "vector instructions": ("device", "cpu", setting(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2000")),
    # Inductor compiles with -march=native: one instruction that the other processor lacks ends the process there.
    "another instruction": ("device", "cpu", processor("flags : sse avx512f amx_tile\n")),
    "threads of generated C++": ("device", "cpu", setting(torch, "get_num_threads", lambda: 99)),
    "autotuning": ("settings", "cpu cuda", inductor(max_autotune=not inductor_config.max_autotune)),
    "casts between kernels": ("settings", "cpu cuda", inductor(emulate_precision_casts=True)),
    "fast math": ("settings", "cpu cuda", inductor(use_fast_math=True)),
    "threads by setting": ("settings", "cpu cuda", inductor(cpp__threads=77)),
    "unsafe math": ("settings", "cpu cuda", inductor(cpp__enable_unsafe_math_opt_flag=True)),
    "a pass over graphs": ("settings", "cpu cuda", inductor(post_grad_custom_post_pass=print)),
    "a pass before the joint graph": ("settings", "cpu cuda", inductor(joint_custom_pre_pass=print)),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", INVALIDATES)
def test_a_change_of_the_environment_is_another_environment_and_is_named(
    tmp_path: Path, kind: str, device: str
) -> None:
    """On a device that it does not concern, it changes nothing."""
    component, concerned, change = INVALIDATES[kind]
    before = environment_of(DEVICES[device], "source")
    with change(tmp_path):
        after = environment_of(DEVICES[device], "source")
    if device in concerned.split():
        assert after.digest() != before.digest()
        assert [line.split(":")[0] for line in before.difference(after)] == [component]
    else:
        assert after == before


def test_every_component_is_in_the_table_or_in_a_test_of_its_own() -> None:
    names = {name for name, _ in environment_of(DEVICES["cpu"], "source").components()}
    assert names == {component for component, _, _ in INVALIDATES.values()} | {"source", "format"}


def test_another_device_other_source_code_and_another_format_are_other_environments() -> None:
    here = environment_of(DEVICES["cpu"], "source")
    assert here.format == FORMAT_VERSION
    others = environment_of(DEVICES["cpu"], "another"), environment_of(DEVICES["cuda"], "source")
    for there in (*others, replace(here, format=FORMAT_VERSION + 1)):
        assert there.digest() != here.digest()


@pytest.mark.parametrize("device", DEVICES)
def test_an_environment_that_was_written_down_is_the_same_one(device: str) -> None:
    here = environment_of(DEVICES[device], "source")
    again = EnvironmentFingerprint(**json.loads(json.dumps(asdict(here))))
    assert again.digest() == here.digest()


UNCONCERNED: dict[str, Change] = {
    "worker processes": inductor(compile_threads=3),
    "where decisions are logged": inductor(autoheuristic_log_path="/somewhere"),
    "where the compiler is": inductor(cuda__cuda_cxx="/somewhere/nvcc"),
    "progress bars": inductor(disable_progress=False),
    "inductor's own cache": inductor(fx_graph_cache=False),
    "traces for people": inductor(trace__enabled=True),
    "autotuning of cudnn": setting(CUDNN, "benchmark", not CUDNN.benchmark),
    # These are in the keys of regions, so that one environment keeps regions for several of them.
    "TF32 in matrix products": setting(MATMUL, "allow_tf32", not MATMUL.allow_tf32),
    "TF32 in convolutions": setting(CUDNN, "allow_tf32", not CUDNN.allow_tf32),
    "fp16 reductions": setting(MATMUL, "allow_fp16_reduced_precision_reduction", False),
    "fp16 accumulation": setting(MATMUL, "allow_fp16_accumulation", True),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", UNCONCERNED)
def test_a_change_that_is_in_no_code_changes_nothing(tmp_path: Path, kind: str, device: str) -> None:
    before = environment_of(DEVICES[device], "source")
    with UNCONCERNED[kind](tmp_path):
        assert environment_of(DEVICES[device], "source") == before


def test_what_a_compile_changes_for_itself_is_no_change_of_the_environment() -> None:
    """Another thread reads the environment meanwhile, for a report or to preload."""
    with inductor_config.patch(max_autotune=not inductor_config.max_autotune):
        before = environment_of(DEVICES["cuda"], "source")
        with environment.own_settings(), inductor_config.patch(force_layout_optimization=True):
            assert environment_of(DEVICES["cuda"], "source") == before
    assert environment_of(DEVICES["cuda"], "source") != before


def test_one_processor_is_told_the_same_however_it_lists_its_instructions(tmp_path: Path) -> None:
    one, two, other = (tmp_path / name for name in ("one", "two", "other"))
    one.write_text("processor : 0\nflags\t\t: avx sse fma\nbugs : spectre\n\nprocessor : 1\nflags\t\t: avx sse fma\n")
    two.write_text("processor : 7\nmodel name : x\nflags : avx sse fma\n")
    other.write_text("Features : asimd sve\n")
    assert environment._instructions(one) == environment._instructions(two)
    assert environment._instructions(other) != environment._instructions(one)
    assert len(environment._instructions(tmp_path / "no Linux")) == 8


# --- our code that makes regions --------------------------------------------------------------------------------


@pytest.fixture
def pack(
    adapter: Callable[[str], ModuleType], comfy: None, monkeypatch: Patch, tmp_path: Path
) -> tuple[Callable[[], str], Path]:
    """(the digest of the code, a copy of this pack)"""
    persistence = adapter("process.store_location")
    for part in ("compile_cache", "nodes"):
        shutil.copytree(ROOT / part, tmp_path / "pack" / part, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(persistence, "_PACK", tmp_path / "pack")
    return persistence.source, tmp_path / "pack"


BLOCKS = "nodes/adapters/blocks"
CODE = {
    "our blocks": f"{BLOCKS}/unets/unet.py",
    "a new file": f"{BLOCKS}/new.py",
    "our tracing": "compile_cache/backends/inductor/lower/tracing.py",
    "our structure": "compile_cache/modules/structure.py",
}
NO_CODE = {
    "what Python compiled": f"{BLOCKS}/__pycache__/common.cpython-311.pyc",
    "a note": f"{BLOCKS}/README.md",
    "our nodes": "nodes/report.py",
}


@pytest.mark.parametrize("kind", [*CODE, *NO_CODE])
def test_code_that_makes_regions_counts_and_other_files_do_not(pack: tuple[Callable[[], str], Path], kind: str) -> None:
    source, folder = pack
    before = source()
    path = folder / {**CODE, **NO_CODE}[kind]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text((path.read_text() if path.exists() else "") + "\n# changed")
    assert (source() != before) == (kind in CODE)


def test_a_file_that_goes_or_is_renamed_counts(pack: tuple[Callable[[], str], Path]) -> None:
    source, folder = pack
    digests = [source()]
    (folder / BLOCKS / "common.py").rename(folder / BLOCKS / "shared.py")
    digests.append(source())
    (folder / BLOCKS / "shared.py").unlink()
    digests.append(source())
    assert len(set(digests)) == 3


def test_where_the_code_lies_and_how_old_it_is_does_not_count(
    pack: tuple[Callable[[], str], Path], adapter: Callable[[str], ModuleType], monkeypatch: Patch, tmp_path: Path
) -> None:
    """Also where the pack is a link in `custom_nodes`."""
    source, folder = pack
    before = source()
    moved = tmp_path / "elsewhere" / "with spaces"
    shutil.copytree(folder, moved)
    for path in moved.rglob("*.py"):
        os.utime(path, (1, 1))
    (tmp_path / "link").symlink_to(moved, target_is_directory=True)
    monkeypatch.setattr(adapter("process.store_location"), "_PACK", tmp_path / "link")
    assert source() == before


def test_a_package_that_a_trace_can_run_through_counts(
    pack: tuple[Callable[[], str], Path], adapter: Callable[[str], ModuleType], monkeypatch: Patch
) -> None:
    source, _ = pack
    before = source()
    monkeypatch.setattr(adapter("process.store_location"), "version_of", lambda name: "99")
    assert source() != before


# --- regions ---------------------------------------------------------------------------------------------------


def key_of(module: nn.Module, **changes: Any) -> str:
    given: dict[str, Any] = {"kind": "Attention", "dims": (TOKENS, CONTEXT), "pattern": "plain", "device": "cpu"}
    given |= {"dtype": torch.float32, "tokens": (2, 8, 16), "torch_flags": (), **changes}
    site = RegionSite("blocks.0", given["kind"], module, original, given["dims"])
    tensors = [torch.empty(given["tokens"], dtype=given["dtype"], device=given["device"]) for _ in range(2)]
    return region_key(site, structure_digest(module), tensors, given["pattern"], given["torch_flags"])


ANOTHER_REGION: dict[str, Callable[[], str]] = {
    "structure": lambda: key_of(seeded(lambda: Attention(heads=4))),
    "kind of the region": lambda: key_of(seeded(Attention), kind="Feed"),
    "which dimensions vary": lambda: key_of(seeded(Attention), dims=(TOKENS, TOKENS)),
    "dtype of the inputs": lambda: key_of(seeded(Attention), dtype=torch.bfloat16),
    "dimensions of the inputs": lambda: key_of(seeded(Attention), tokens=(2, 8, 16, 1)),
    "device": lambda: key_of(seeded(Attention), device="meta"),
    "weights that are cast on the way": lambda: key_of(seeded(Attention), pattern="c"),
    "a flag of torch": lambda: key_of(seeded(Attention), torch_flags=(("fp16 accumulation", True),)),
}


@pytest.mark.parametrize("kind", ANOTHER_REGION)
def test_another_layout_of_operations_is_another_region(kind: str) -> None:
    assert ANOTHER_REGION[kind]() != key_of(seeded(Attention))


SAME_REGION: dict[str, Callable[[], str]] = {
    "values of the weights": lambda: key_of(seeded(Attention, seed=9)),
    "sizes that vary": lambda: key_of(seeded(Attention), tokens=(17, 154, 16)),
    "order of use": lambda: [key_of(seeded(Model), kind="Other"), key_of(seeded(Attention))][1],
    "gradients": lambda: key_of(seeded(Attention).requires_grad_(False)),
    "where the weights came from": lambda: key_of(reloaded()),
}


def reloaded() -> nn.Module:
    """As a checkpoint is loaded, whatever its file is called."""
    module = seeded(Attention, seed=3)
    module.load_state_dict(seeded(Attention).state_dict(), assign=True)
    return module


@pytest.mark.parametrize("kind", SAME_REGION)
def test_what_no_code_depends_on_leaves_the_region_as_it_is(kind: str) -> None:
    assert SAME_REGION[kind]() == key_of(seeded(Attention))


# --- other processes -------------------------------------------------------------------------------------------

TELL = """
import json, sys, torch
torch.cuda.get_device_name = lambda device=None: "NVIDIA H200"
torch.cuda.get_device_capability = lambda device=None: (9, 0)
from tests.contract.backends.inductor.lower.test_environment import DEVICES, key_of
from tests.contract.rig import Attention, seeded
from compile_cache.backends.inductor.lower.environment import environment_of
components = [dict(environment_of(device, "source").components()) for device in DEVICES.values()]
print(json.dumps([*components, key_of(seeded(Attention))]))
"""
PLACES = ("HOME", "TMPDIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "XDG_CACHE_HOME", "CUDA_HOME")


def told_by_a_process(folder: Path = ROOT, **variables: str) -> list[Any]:
    """The components of both environments, and the key of a region."""
    printed = run_python(TELL, folder=folder, OMP_NUM_THREADS="1", **variables)
    told: list[Any] = json.loads(printed.splitlines()[-1])
    return told


def test_another_process_at_another_place_tells_the_same(tmp_path: Path) -> None:
    places = {name: str(tmp_path) for name in PLACES}
    others = {"USER": "somebody", "LANG": "C", "TZ": "Asia/Tokyo", "MAX_JOBS": "3", "RESOLUTE_BUDGET_MB": "99"}
    torchs = {"TORCHINDUCTOR_COMPILE_THREADS": "5", "TORCH_LOGS": "+inductor", "CC": "another-cc", "CXX": "another-c++"}
    told = told_by_a_process(tmp_path, PYTHONHASHSEED="12345", **places, **others, **torchs)
    assert told == told_by_a_process()
