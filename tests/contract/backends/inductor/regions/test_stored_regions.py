"""Regions in the store: loaded without a compile, right at every size, and never in another environment."""

from __future__ import annotations

import errno
import logging
import os
import sys
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any
from unittest.mock import ANY

import pytest
import torch
from torch import nn
from torch._inductor import config as inductor_config
from torch._inductor.runtime.cache_dir_utils import temporary_cache_dir
from torch._inductor.triton_bundler import TritonBundle

from compile_cache.backends.base import Located
from compile_cache.backends.inductor.backend import InductorBackend
from compile_cache.backends.inductor.lower import artifacts
from compile_cache.backends.inductor.lower.artifacts import pack, unpack
from compile_cache.backends.inductor.lower.environment import environment_of
from compile_cache.backends.inductor.regions import region
from compile_cache.config import CacheConfig
from compile_cache.store.artifact_store import Artifact, ArtifactStore, InvalidArtifactError
from compile_cache.torch_compat.flags import torch_flags

from .....programs import run_python
from ....rig import TOLERANCE, Block, Bound, Convolution, Model, Rig, inputs, seeded, tokens

SIZES = [(1, 8, 8, 7), (17, 8, 8, 7), (2, 33, 25, 154), (1, 1, 1, 1), (3, 17, 9, 5)]
CPU = torch.device("cpu")


def process(folder: Path, **config: Any) -> Rig:
    """A new process, with nothing in memory, that stores its regions in `folder`."""
    return Rig(InductorBackend(), store_folder=folder, source="one", **config)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the two regions of the model, from a process that is gone."""
    folder = tmp_path_factory.mktemp("kept") / "store"
    rig = process(folder)
    with rig.expect(region_compiles=2, region_calls=4, graph_calls=1, verifications=ANY):
        rig.bind(seeded(Model))(*inputs())
    return folder


@pytest.fixture
def copied(kept: Path, tmp_path: Path) -> Path:
    """The same for one test alone."""
    store, copy = store_of(kept), store_of(tmp_path / "copy")
    for artifact in everything(store):
        copy.save(artifact)
    return tmp_path / "copy"


def store_of(folder: Path) -> ArtifactStore:
    return ArtifactStore(folder, environment_of(CPU, "one"), 1 << 30)


def everything(store: ArtifactStore) -> list[Artifact]:
    keys = {store.read(name).key for name in store.names()}
    return [artifact for key in sorted(keys) for artifact in store.load(key)]


def check_sizes(bound: Bound) -> None:
    assert {size: error for size in SIZES if (error := bound.error(*inputs(*size))) > TOLERANCE} == {}


def test_code_of_other_flags_is_never_loaded_and_both_are_kept(copied: Path) -> None:
    def run(rig: Rig) -> None:
        """As the adapter calls: with the present flags."""
        bound = rig.bind(seeded(Model))
        assert bound.error(*inputs()) <= TOLERANCE  # under no flags, as `kept` was made
        bound(*inputs(), torch_flags=torch_flags("cpu"))

    here = process(copied)
    with here.expect(region_loads=2, region_compiles=2, region_calls=8, graph_calls=2, verifications=ANY):
        run(here)
    torch.backends.cuda.enable_flash_sdp(False)  # tracing chooses a kernel of attention by it
    try:
        there = process(copied)
        with there.expect(region_loads=2, region_compiles=2, region_calls=8, graph_calls=2, verifications=ANY):
            run(there)
    finally:
        torch.backends.cuda.enable_flash_sdp(True)
    again = process(copied)
    with again.expect(region_loads=4, region_calls=8, graph_calls=2, verifications=ANY):
        run(again)
    assert len(store_of(copied).names()) == 6


def test_the_next_process_loads_and_compiles_nothing(kept: Path) -> None:
    rig = process(kept)
    bound = rig.bind(seeded(Model))
    with rig.expect(region_loads=2, region_calls=4, graph_calls=1):
        assert bound.error(*inputs()) <= TOLERANCE
    with rig.expect(region_calls=4 * len(SIZES), graph_calls=len(SIZES), verifications=ANY):
        check_sizes(bound)
    assert bound.program.regions == (2, 2)


def test_another_application_compares_once_what_it_loads(copied: Path) -> None:
    for application, compared in (("new", 2), ("new", 0), ("", 0), ("newer", 2), ("new", 0)):
        rig = process(copied, application=application)
        with rig.expect(region_loads=2, region_calls=4, graph_calls=1, verifications=compared):
            assert rig.bind(seeded(Model)).error(*inputs()) <= TOLERANCE
        assert len(store_of(copied).names()) == 2


def turned(x: torch.Tensor) -> torch.Tensor:
    return -x


class Turning(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turn = vars(sys.modules[__name__])["turned"]  # not by name, so no key has its code
        return turn(self.linear(x)) + x


def test_code_that_is_wrong_in_another_application_is_compiled_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update changed code that no key sees."""

    def error(**config: str) -> float:
        return rig_of(**config).bind(seeded(lambda: nn.Sequential(Turning()))).error(tokens())

    def rig_of(**config: str) -> Rig:
        rigs.append(process(tmp_path / "store", **config))
        return rigs[-1]

    rigs: list[Rig] = []
    assert error() <= TOLERANCE
    monkeypatch.setattr(sys.modules[__name__], "turned", lambda x: 2 * x)
    assert error() > TOLERANCE  # the same application does not look again
    assert error(application="new") <= TOLERANCE
    assert error(application="new") <= TOLERANCE
    monkeypatch.undo()
    assert error() <= TOLERANCE  # the other application did not remove what is right here
    assert [rig.cache.stats.counters.region_compiles for rig in rigs] == [1, 0, 1, 0, 0]


class Branching(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + (1 if x.shape[1] > 8 else 2)


def test_another_application_keeps_code_whose_guards_exclude_its_first_sizes(tmp_path: Path) -> None:
    assert process(tmp_path / "store").bind(seeded(lambda: nn.Sequential(Branching()))).error(tokens(5)) <= TOLERANCE
    rig = process(tmp_path / "store", application="new")
    bound = rig.bind(seeded(lambda: nn.Sequential(Branching())))
    with rig.expect(region_loads=1, region_compiles=1, region_calls=1, graph_calls=1, verifications=ANY):
        assert bound.error(tokens(20)) <= TOLERANCE
    with rig.expect(region_calls=1, graph_calls=1, verifications=1):
        assert bound.error(tokens(5)) <= TOLERANCE


# Loads a region of `folder` in a process. Prints whether its instructions were taken, whether they are those in use,
# and how many other Pythons were started: each imports torch.
LOAD = """
import sys
from pathlib import Path
from tests.contract.backends.inductor.regions.test_stored_regions import everything, store_of
from compile_cache.backends.inductor.lower import artifacts

started = []
sys.addaudithook(lambda event, given: started.append(given[1]) if event == "subprocess.Popen" else None)
artifact = everything(store_of(Path(sys.argv[1])))[0]
wanted = artifact.about["instructions"] = " ".join(sys.argv[2:]) or artifact.about["instructions"]
artifacts._expect_instructions(wanted)
taken = artifacts.valid_vec_isa_list.cache_info().currsize
artifacts.unpack(artifact)
print(taken, artifacts._instructions() == wanted, sum(sys.executable in each for each in started))
"""


def test_instructions_of_the_processor_are_not_searched_for_again(kept: Path) -> None:
    assert run_python(LOAD, kept).split() == ["1", "True", "0"]


def test_instructions_that_this_processor_lacks_are_searched_for(kept: Path) -> None:
    assert run_python(LOAD, kept, "-mno-such-instructions").split()[:2] == ["0", "False"]


def test_locating_stored_regions_does_not_import_inductor(kept: Path) -> None:
    backend = InductorBackend()
    keys = frozenset(artifact.key for artifact in everything(store_of(kept)))
    config = CacheConfig(store_folder=kept, source="one")
    assert backend.locate([*keys, "unknown"], CPU, config) == Located(on_disk=keys, missing=frozenset({"unknown"}))
    assert backend._table is None


def test_a_backend_is_starting_while_it_loads_its_first_regions_ahead(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They import what loading needs, and a call behind the picture runs its original meanwhile."""
    rig, states = process(copied), []
    keys = {artifact.key for artifact in everything(store_of(copied))}
    load = ArtifactStore.load

    def noted(store: ArtifactStore, key: str, *known: Any) -> list[Artifact]:
        states.append(rig.backend.is_starting)
        return load(store, key, *known)

    monkeypatch.setattr(ArtifactStore, "load", noted)
    for key in keys:
        assert rig.backend.preload([key], CPU, rig.cache.config) == 1
    assert states == [True, False]
    assert not rig.backend.is_starting


def test_a_start_without_a_compiler_keeps_what_is_stored(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch refuses to load code there, which says nothing about the files."""
    names, rig = store_of(copied).names(), process(copied)
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(copied))
        patch.delenv("CXX", raising=False)
        keys = {artifact.key for artifact in everything(store_of(copied))}
        assert [rig.backend.preload([key], CPU, rig.cache.config) for key in keys] == [0, 0]
    assert store_of(copied).names() == names


def test_a_model_with_other_weights_uses_them_too(kept: Path) -> None:
    rig = process(kept)
    with rig.expect(region_loads=2, region_calls=4, graph_calls=1):
        assert rig.bind(seeded(Model, seed=7)).error(*inputs()) <= TOLERANCE


def doubled(self: Any, x: torch.Tensor) -> torch.Tensor:
    """In place of the method of `Convolution`; the author of that one wrote it, so it is no foreign code."""
    result: torch.Tensor = self.conv(torch.nn.functional.silu(self.norm(x))) * 2
    return result


@pytest.mark.parametrize("how", ["method", pytest.param("code", marks=pytest.mark.long)])
def test_regions_of_a_class_that_was_patched_are_not_those_of_the_next_process_without_the_patch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    with monkeypatch.context() as patch:
        if how == "method":
            patch.setattr(Convolution, "forward", doubled)
        else:
            patch.setattr(Convolution.forward, "__code__", doubled.__code__)
        rig = process(tmp_path)
        compiled = 2 if how == "method" else 1  # the file of the class does not have the code: it is foreign, and runs
        bypasses = {} if how == "method" else {"replaced_forward": 1}
        counted = {"region_compiles": compiled, "region_calls": 2 * compiled, "graph_calls": 1, "verifications": ANY}
        with rig.expect(bypasses=bypasses, **counted):
            assert rig.bind(seeded(Model)).error(*inputs()) <= TOLERANCE
    rig = process(tmp_path)
    with rig.expect(region_compiles=1, region_loads=1, region_calls=4, graph_calls=1, verifications=ANY):
        assert rig.bind(seeded(Model)).error(*inputs()) <= TOLERANCE


@pytest.mark.parametrize("change", ["source", "store off"])
def test_what_was_compiled_from_other_code_is_not_used(copied: Path, change: str) -> None:
    changed = {"source": "another"} if change == "source" else {"store_folder": None}
    rig = Rig(InductorBackend(), **{"store_folder": copied, "source": "one", **changed})
    with rig.expect(region_compiles=2, region_calls=4, graph_calls=1, verifications=ANY):
        assert rig.bind(seeded(Model)).error(*inputs()) <= TOLERANCE


def test_an_artifact_that_does_not_load_is_removed_and_compiled_again(
    copied: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = store_of(copied)
    for artifact in everything(store):
        store.remove(artifact.name)
        store.save(replace(artifact, payload=b"no zip at all"))
    rig = process(copied)
    with (
        caplog.at_level(logging.WARNING),
        rig.expect(region_compiles=2, region_calls=4, graph_calls=1, verifications=ANY),
    ):
        rig.bind(seeded(Model))(*inputs())
    assert caplog.text.count("BadZipFile") == 2
    again = process(copied)
    with again.expect(region_loads=2, region_calls=4, graph_calls=1):
        again.bind(seeded(Model))(*inputs())


def test_an_artifact_that_finds_no_memory_is_loaded_by_the_next_call(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: Any) -> Any:
        raise torch.cuda.OutOfMemoryError("out of memory")

    rig = process(copied, workers=0)
    bound = rig.bind(seeded(Model))
    with monkeypatch.context() as patch, rig.expect({"out_of_memory": 2}, eager_calls=1):
        patch.setattr(artifacts, "_load", full)
        assert bound.error(*inputs()) == 0
    with rig.expect(region_loads=2, region_calls=4, graph_calls=1):
        assert bound.error(*inputs()) <= TOLERANCE


def test_two_threads_may_put_one_library_in_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second does so while the first is about to."""
    replace, name = os.replace, PurePosixPath("folder/library.so")

    def late(source: Any, target: Any) -> None:
        monkeypatch.setattr(os, "replace", replace)
        artifacts._place(name, b"code")
        replace(source, target)

    with temporary_cache_dir(str(tmp_path)):
        monkeypatch.setattr(os, "replace", late)
        artifacts._place(name, b"code")
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.*")] == [str(name)]
    assert (tmp_path / name).read_bytes() == b"code"


def test_a_setting_that_changes_in_between_is_another_environment_at_once(copied: Path) -> None:
    before = len(store_of(copied).names())
    rig = process(copied, workers=0)
    with (
        inductor_config.patch(emulate_precision_casts=True),
        rig.expect(region_compiles=2, region_calls=4, graph_calls=1, verifications=ANY),
    ):
        rig.bind(seeded(Model))(*inputs())
    again = process(copied, workers=0)
    with again.expect(region_loads=2, region_calls=4, graph_calls=1):
        again.bind(seeded(Model))(*inputs())
    assert again.backend.stored()["regions"] == before


@pytest.mark.grid(1)
@pytest.mark.parametrize("damage", [{"symbols": {}}, {"assumptions": [["Shell", 1]]}, {"used_weights": None}])
def test_an_artifact_with_a_foreign_description_is_refused(copied: Path, damage: dict[str, Any]) -> None:
    store = store_of(copied)
    for artifact in everything(store):
        store.remove(artifact.name)
        store.save(replace(artifact, about={**artifact.about, **damage}))
    rig = process(copied)
    with rig.expect(region_compiles=ANY, region_loads=ANY, region_calls=4, graph_calls=1, verifications=ANY):
        assert rig.bind(seeded(Model)).error(*inputs()) <= TOLERANCE
    assert rig.cache.stats.counters.region_compiles > 0


def test_what_two_processes_met_at_once_is_compiled_once(tmp_path: Path) -> None:
    """The second begins to build while the first has just done so: it finds that under the lock."""
    one, two = process(tmp_path / "store"), process(tmp_path / "store")
    second = two.bind(seeded(Model))
    second.program._survey(0)  # type: ignore[attr-defined]
    one.bind(seeded(Model))(*inputs())
    with two.expect(region_loads=2, region_calls=4, graph_calls=1):
        second(*inputs())


def test_sizes_that_one_artifact_excludes_get_a_second_and_both_are_kept(tmp_path: Path) -> None:
    class Halved(nn.Module):
        """Only rows in pairs: an odd size has other code."""

        dims = (("b", "n", None),)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.unflatten(1, (-1, 2)).sum(2) if x.shape[1] % 2 == 0 else x * 2

    from compile_cache.modules.site import Hook, RegionSite

    def hooks(module: nn.Module) -> Any:
        def build(run: Any, bypass: Any) -> list[Hook]:
            site = RegionSite("halved", "Halved", module, lambda m, x: Halved.forward(m, x), Halved.dims)
            return [Hook(module, lambda x: run(site, x), (site,))]

        return build

    for loads in (0, 1):
        rig = process(tmp_path / "store")
        module = Halved().eval()
        bound = rig.bind(module, hooks(module))
        for rows in (8, 7, 12, 5):
            x = torch.randn(2, rows, 16)
            assert torch.equal(bound(x), Halved.forward(module, x)), rows
        counters = rig.cache.stats.counters
        assert (counters.region_compiles, counters.region_loads) == ((0, 2) if loads else (2, 0))


def test_guards_come_back_as_they_were(kept: Path) -> None:
    """At every combination of small sizes the verdict is the same."""
    rig = process(kept)
    rig.bind(seeded(Model))(*inputs())
    regions = list(rig.backend.table._regions.values())  # type: ignore[attr-defined]
    assert len(regions) == 2
    for stored in regions:
        for compiled in stored.compiled:
            again = unpack(pack(stored.key, stored.label, compiled))
            names = list(compiled.guards.symbols)
            for size in (1, 2, 3, 16, 17, 64):
                sizes = dict.fromkeys(names, size)
                assert again.guards.check(sizes) == compiled.guards.check(sizes)


class Launched:
    """A kernel of inductor's that was launched: it refuses to be pickled."""

    def __getstate__(self) -> Any:
        raise AssertionError("pickle should not be called after make_launchers()")


def test_a_kernel_that_was_launched_before_is_kept_without_its_launchers(kept: Path) -> None:
    (artifact, *_) = everything(store_of(kept))
    compiled = unpack(artifact)
    assert compiled.graph is not None
    compiled.graph._triton_bundle = TritonBundle([], [Launched()])  # type: ignore[list-item]
    assert unpack(pack(artifact.key, artifact.label, compiled)).static == compiled.static


def test_a_graph_that_cannot_be_pickled_is_refused_by_name(kept: Path) -> None:
    (artifact, *_) = everything(store_of(kept))
    compiled = unpack(artifact)
    compiled.graph.fx_kwargs = {"hook": Launched()}  # type: ignore[union-attr, typeddict-unknown-key]
    with pytest.raises(InvalidArtifactError, match="cannot be kept"):
        pack(artifact.key, artifact.label, compiled)


def test_a_full_disk_costs_a_compile_and_no_artifact(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    before, rig = store_of(copied).names(), process(copied)
    monkeypatch.setattr(artifacts, "_load", full)
    with rig.expect(region_compiles=2, region_calls=4, graph_calls=1, verifications=ANY):
        assert rig.bind(seeded(Model)).error(*inputs()) <= TOLERANCE
    assert set(before) <= set(store_of(copied).names())


# What a load may raise for reasons that are not in the file.
OF_THE_MOMENT: list[Exception] = [
    *[OSError(code, os.strerror(code)) for code in errno.errorcode],
    OSError("libcode.so: failed to map segment from shared object"),  # a temporary folder without programs
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    AssertionError("Torch not compiled with CUDA enabled"),
    ImportError("cannot import name 'launcher'"),
    MemoryError(),
    RecursionError("maximum recursion depth exceeded"),
]
STEPS = ("_expect_instructions", "private_cache", "place", "remove_other_source", "launch_by_address")


def test_no_fault_of_the_moment_deletes_a_region(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is the region tried again in this process."""
    names, (artifact, *_) = store_of(copied).names(), everything(store_of(copied))
    for number, error in enumerate(OF_THE_MOMENT):
        store = store_of(copied)
        with monkeypatch.context() as patch:

            def fail(*given: Any, error: Exception = error) -> Any:
                raise error

            patch.setattr(artifacts, STEPS[number % len(STEPS)], fail)
            assert region.Region(artifact.key, "Block").load(store) == 0, repr(error)
        assert region.Region(artifact.key, "Block").load(store) == 0, repr(error)
        assert store.names() == names, repr(error)
    with (rig := process(copied)).expect(region_loads=2, region_calls=4, graph_calls=1):
        assert rig.bind(seeded(Model)).error(*inputs()) <= TOLERANCE


# A start whose C++ compiler is there and fails. Prints what its calls counted.
WITH_A_COMPILER = """
import sys
from pathlib import Path
from tests.contract.rig import Model, inputs, seeded
from tests.contract.backends.inductor.regions.test_stored_regions import process

rig = process(Path(sys.argv[1]), workers=0)
assert rig.bind(seeded(Model)).error(*inputs()) <= 1e-4
print(rig.cache.stats.counters.region_loads)
"""


def test_a_compiler_that_fails_deletes_no_region(copied: Path, tmp_path: Path) -> None:
    names, empty = store_of(copied).names(), {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    for compiler, loads in (("false", "0"), ("g++", "2")):
        assert run_python(WITH_A_COMPILER, copied, CXX=compiler, **empty).strip() == loads
        assert set(names) <= set(store_of(copied).names())
