"""A bundle of real compiled regions: what one machine exports another one runs, without a compile."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from unittest.mock import ANY

import pytest
import torch

from compile_cache.backends.inductor.backend import InductorBackend
from compile_cache.backends.inductor.lower.environment import environment_of
from compile_cache.store.artifact_store import ArtifactStore
from compile_cache.store.bundle import BundleError, environments, export_bundle, import_bundle

from ...programs import run_python
from ..rig import TOLERANCE, Model, Rig, inputs, seeded

CPU = torch.device("cpu")
SIZES = [(2, 8, 8, 7), (1, 8, 8, 7), (17, 8, 8, 7), (2, 33, 25, 154), (3, 17, 9, 5)]

# A process of its own, with nothing in memory and nothing on disk but what was imported. Prints how many kernels
# inductor built (trials of what the host's compiler can do are none), the counters, and the largest error.
ELSEWHERE = """
import json, sys, traceback
from pathlib import Path
from torch._inductor import cpp_builder
from compile_cache.backends.inductor.backend import InductorBackend
from tests.contract.rig import Model, Rig, inputs, seeded

kernels = []
build = cpp_builder.CppBuilder.build

def counted(self):
    if not {"check_build", "_precompile_header"} & {frame.name for frame in traceback.extract_stack()}:
        kernels.append(self)
    build(self)

cpp_builder.CppBuilder.build = counted
rig = Rig(InductorBackend(), store_folder=Path(sys.argv[1]), source="one")
bound = rig.bind(seeded(Model, seed=5))
errors = [bound.error(*inputs(*size)) for size in json.loads(sys.argv[2])]
counters = rig.cache.stats.counters
told = [len(kernels), counters.region_compiles, counters.region_loads, counters.region_calls, max(errors)]
print(json.dumps(told))
"""


def store_in(folder: Path, source: str = "one") -> ArtifactStore:
    return ArtifactStore(folder, environment_of(CPU, source), 1 << 30)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The two regions of the model, exported by a process that compiled them."""
    folder = tmp_path_factory.mktemp("exported")
    rig = Rig(InductorBackend(), store_folder=folder / "store", source="one")
    with rig.expect(region_compiles=2, region_calls=4, graph_calls=1, verifications=ANY):
        rig.bind(seeded(Model))(*inputs())
    assert list(environments(folder / "store").values()) == [environment_of(CPU, "one")]
    report = export_bundle(store_in(folder / "store"), folder / "bundle")
    assert (len(report.done), report.refused) == (2, {})
    return folder / "bundle"


def test_an_imported_region_runs_without_a_compile_at_every_size(file: Path, tmp_path: Path) -> None:
    report = import_bundle(file, store_in(tmp_path / "store"))
    assert (len(report.done), report.refused) == (2, {})
    rig = Rig(InductorBackend(), store_folder=tmp_path / "store", source="one")
    bound = rig.bind(seeded(Model, seed=5))
    calls = {"region_calls": 4 * len(SIZES), "graph_calls": len(SIZES)}
    with rig.expect(region_loads=2, verifications=ANY, **calls):
        assert {size: error for size in SIZES if (error := bound.error(*inputs(*size))) > TOLERANCE} == {}


def test_another_process_at_another_place_runs_it_and_builds_nothing(file: Path, tmp_path: Path) -> None:
    """Home, temporary files, working folder, inductor's cache, order of hashes: none of them is part of a region."""
    import_bundle(file, store_in(tmp_path / "store"))
    places = {name: str(tmp_path / name.lower()) for name in ("HOME", "TMPDIR", "TORCHINDUCTOR_CACHE_DIR")}
    for place in places.values():
        Path(place).mkdir()
    threads = str(torch.get_num_threads())  # that the code was compiled for, whatever this process takes it from
    variables = {**places, "PYTHONHASHSEED": "7", "OMP_NUM_THREADS": threads}
    printed = run_python(ELSEWHERE, tmp_path / "store", json.dumps(SIZES), folder=tmp_path, **variables)
    *counted, error = json.loads(printed.splitlines()[-1])
    assert counted == [0, 0, 2, 4 * len(SIZES)]  # kernels, compiles, loads, calls
    assert error <= TOLERANCE


def test_regions_traced_from_other_code_are_refused(file: Path, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="source: another here, one there"):
        import_bundle(file, store_in(tmp_path / "store", "another"))


def test_what_a_bundle_says_of_its_regions_names_no_place(file: Path) -> None:
    """Only inside the payloads, which are torch's, messages of failed checks name torch's own headers."""
    with tarfile.open(file) as tar:
        headers = [tar.extractfile(each).readline() for each in tar]  # type: ignore[union-attr]
    assert len(headers) == 3
    assert not any(b"/" in each for each in headers)
