"""Each backend gives the answer of the original, and one that cannot run says why and what to do."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from compile_cache.backends import registry
from compile_cache.backends.base import Backend
from compile_cache.backends.inductor import backend as inductor_backend
from compile_cache.backends.inductor import toolchain
from compile_cache.errors import BackendUnavailableError, UnknownBackendError

from ..rig import TOLERANCE, Model, Rig, inputs, seeded

COMPILER_VARIABLES = ("CC", "CXX")


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine with nothing on its path."""
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in COMPILER_VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("name", registry.NAMES)
class TestEveryBackend:
    def test_its_results_are_the_originals(self, name: str) -> None:
        if name == "cudagraph" and not torch.cuda.is_available():
            pytest.skip("CUDA graphs need an NVIDIA GPU; tests/gpu runs them there")
        if name == "oneflow":
            pytest.skip("OneFlow needs an environment of its own; scripts/test --oneflow runs it there")
        backend, capabilities, _ = registry.resolve(name, "cpu")
        rig = Rig(backend)
        bound = rig.bind(seeded(Model))
        for size in ((2, 8, 8, 7), (1, 9, 5, 77), (2, 8, 8, 7)):
            assert bound.error(*inputs(*size)) <= (TOLERANCE if capabilities.compiles else 0)
        counters = rig.cache.report()["counters"]
        assert counters["bypasses"] == {}
        answered = counters["graph_calls"] if capabilities.compiles else counters["eager_calls"]
        assert answered == 3
        assert bool(counters["region_calls"]) == capabilities.compiles

    def test_it_is_one_object_under_its_own_name(self, name: str) -> None:
        assert registry.get(name).name == name
        assert registry.get(name) is registry.get(name)

    def test_its_probe_gives_a_reason_and_a_remedy_wherever_it_cannot_run(self, name: str) -> None:
        for device in ("cpu", "cuda", "mps", "xpu", "privateuseone"):
            capabilities = registry.get(name).probe(device)
            if not capabilities.available:
                assert capabilities.reason
                assert capabilities.remedy
                assert not capabilities.captures

    def test_binding_compiles_nothing(self, name: str) -> None:
        rig = Rig(registry.get(name))
        with rig.expect():
            rig.bind(seeded(Model))


def test_the_choices_are_auto_and_every_backend() -> None:
    assert list(registry.CHOICES) == ["auto", *registry.NAMES]


def test_a_node_does_not_wait_for_a_backend_that_starts_and_its_first_call_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inductor = registry.get("inductor")
    lack = inductor_backend.Capabilities(available=False, reason="it lacks a name", remedy="Update torch.")
    monkeypatch.setattr(inductor_backend, "_probe_torch", lambda machine, device: lack)
    monkeypatch.setattr(type(inductor), "is_starting", True)
    for name in ("auto", "inductor"):
        backend, capabilities, _ = registry.resolve(name, "cpu", waits=False)
        assert (backend, capabilities.compiles) == (inductor, True)
    assert registry.resolve("auto", "cpu")[0].name == "eager"
    with pytest.raises(BackendUnavailableError, match="it lacks a name"):
        registry.resolve("inductor", "cpu")
    monkeypatch.setattr(type(inductor), "is_starting", False)
    assert registry.resolve("auto", "cpu", waits=False)[0].name == "eager"


def test_an_unknown_backend_is_refused_with_the_choices() -> None:
    with pytest.raises(UnknownBackendError) as caught:
        registry.resolve("tensorrt", "cpu")
    assert "tensorrt" in str(caught.value)
    for choice in registry.CHOICES:
        assert choice in str(caught.value)


def test_cudagraph_without_cuda_is_refused_with_what_to_choose() -> None:
    with pytest.raises(BackendUnavailableError, match=r"NVIDIA.*'cpu'.*Choose 'auto' or 'inductor'"):
        registry.resolve("cudagraph", "cpu")


def test_auto_on_a_cpu_is_inductor() -> None:
    backend, capabilities, why = registry.resolve("auto", "cpu")
    assert (backend.name, why) == ("inductor", "inductor")
    assert capabilities.compiles
    assert not capabilities.captures


def test_auto_on_an_unknown_device_is_eager_and_says_why() -> None:
    backend, _, why = registry.resolve("auto", "mps")
    assert backend.name == "eager"
    assert "not inductor" in why
    assert "not cudagraph" in why


@pytest.mark.usefixtures("no_compiler")
class TestWithoutACompiler:
    def test_auto_falls_back_to_eager_and_names_the_compiler(self) -> None:
        backend, _, why = registry.resolve("auto", "cpu")
        assert backend.name == "eager"
        assert "no C++ compiler" in why

    def test_inductor_by_name_is_refused_with_the_remedy(self) -> None:
        with pytest.raises(BackendUnavailableError, match=r"no C\+\+ compiler.*Install one"):
            registry.resolve("inductor", "cpu")

    @pytest.mark.skipif(sys.platform == "win32", reason="CXX is no convention there")
    def test_a_compiler_that_the_environment_names_counts(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        compiler = tmp_path / "my-compiler"
        compiler.write_text("#!/bin/sh\n", encoding="utf-8")
        compiler.chmod(0o755)
        monkeypatch.setenv("CXX", str(compiler))
        assert registry.get("inductor").probe("cpu").available


@pytest.mark.skipif(sys.platform == "win32", reason="Triton brings a compiler there, and CXX is no convention")
@pytest.mark.parametrize(
    ("there", "variable", "lacks"),
    [
        (["g++", "gcc"], "", []),
        (["c++", "cc"], "", ["cpu", "cuda"]),  # torch and Triton try no such name
        (["g++", "gcc"], "no-such-compiler", ["cpu", "cuda"]),  # they try no other than the one that is named
    ],
)
@pytest.mark.usefixtures("no_compiler")
def test_only_compilers_that_torch_and_triton_start_count(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, there: list[str], variable: str, lacks: list[str]
) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(toolchain, "find_spec", lambda name: object())
    for name in there:
        (tmp_path / name).write_text("#!/bin/sh\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    for name in COMPILER_VARIABLES if variable else ():
        monkeypatch.setenv(name, variable)
    found = {device: toolchain.lack_of(device) for device in ("cpu", "cuda")}
    assert [device for device, lack in found.items() if lack is not None] == lacks
    assert all(lack is None or variable in lack.reason for lack in found.values())


@pytest.mark.parametrize("version", ["2.7.1", "2.0.1+cu118", "1.13.1"])
def test_a_torch_that_is_too_old_is_named_with_the_oldest_that_works(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    capabilities = registry.get("inductor").probe("cpu")
    assert not capabilities.available
    assert version in capabilities.reason
    assert ".".join(map(str, inductor_backend.OLDEST_TORCH)) in capabilities.reason


@pytest.mark.parametrize("version", ["2.8.0", "2.11.0+cu130", "2.12.0a0+git1234", "3.0.0"])
def test_a_newer_torch_is_not_refused_for_its_version(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    assert registry.get("inductor").probe("cpu").available


def test_a_backend_that_cannot_capture_says_so_when_it_is_asked_to() -> None:
    backend: Backend = registry.get("eager")
    bound = Rig(backend).bind(seeded(Model))
    with pytest.raises(NotImplementedError, match="does not capture"):
        bound.program.capture(None, None, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(("capability", "can_compile"), [((6, 1), False), ((7, 0), True), ((12, 0), True)])
def test_a_card_that_triton_refuses_is_known_before_the_first_region(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], can_compile: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(toolchain, "find_spec", lambda name: object())
    monkeypatch.setattr(toolchain.shutil, "which", lambda name: name)
    found = inductor_backend._probe_machine("cuda")
    assert found.available is can_compile
    assert can_compile or "6.1" in found.reason
    assert can_compile or registry.resolve("auto", "cuda")[0].name == "cudagraph"


@pytest.fixture
def include(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where Python's headers should be; there are none."""
    folder = tmp_path / "include"
    folder.mkdir()
    monkeypatch.setattr(toolchain.sysconfig, "get_path", lambda name, scheme: str(folder))
    for name in toolchain._SEARCHED:
        monkeypatch.delenv(name, raising=False)
    return folder


def test_missing_headers_are_named_with_their_package(include: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "_WINDOWS", False)
    with pytest.raises(BackendUnavailableError, match=r"Python\.h is missing.*apt install python3\.\d+-dev"):
        registry.resolve("inductor", "cpu")
    assert registry.resolve("auto", "cpu")[0].name == "eager"
    (include / "Python.h").touch()
    assert registry.get("inductor").probe("cpu").available


def test_headers_in_a_folder_that_compilers_search_count(include: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = include.parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "Python.h").touch()
    monkeypatch.setenv("CPATH", f"{include.parent}{os.pathsep}{elsewhere}")
    assert registry.get("inductor").probe("cpu").available


def test_the_python_of_comfyuis_portable_build_lacks_two_folders(
    include: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(toolchain, "_WINDOWS", True)
    monkeypatch.setattr(toolchain.shutil, "which", lambda name: name)
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path))
    libs = tmp_path / "libs"
    for missing in (include, libs):
        lack = toolchain.lack_of("cpu")
        assert lack is not None
        assert str(missing) in lack.reason
        assert lack.remedy.startswith("Copy 'include' and 'libs' of a usual Python 3.")
        (include / "Python.h").touch()
    libs.mkdir()
    (libs / "python{}{}.lib".format(*sys.version_info)).touch()
    assert toolchain.lack_of("cpu") is None
