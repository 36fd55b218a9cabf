"""A torch that lacks a private name costs a feature, which is named, and never a prompt."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from types import ModuleType

import pytest
import torch

from compile_cache.backends import registry
from compile_cache.backends.inductor import backend as inductor_backend
from compile_cache.backends.inductor.lower import compiled_region
from compile_cache.backends.inductor.lower.compiled_region import KernelByAddress, launch_by_address
from compile_cache.torch_compat import private_names
from compile_cache.torch_compat.private_names import NAMES, Feature

from ...programs import run_python

# One small model in a process whose torch lacks a name, through `auto`. Prints what ran, and how well. With "nothing",
# which is no name, the region is compiled into the store that the others find it in.
PROGRAM = """
import json, pathlib, sys
from dataclasses import replace

store, *names = sys.argv[1:]
found = {}
for name in names:
    for module in [each for each in sys.modules if each.split(".")[0] in ("compile_cache", "tests")]:
        del sys.modules[module]
    from compile_cache.torch_compat import private_names
    rows = [replace(each, module="torch.gone") if each.name == name else each for each in private_names._TABLE]
    private_names._TABLE = tuple(rows)
    private_names.NAMES = {each.name: each for each in rows}
    from compile_cache.backends import registry
    from tests.contract.rig import Attention, Rig, random, seeded
    backend, can, why = registry.resolve("auto", "cpu")
    rig = Rig(type(backend)(), store_folder=pathlib.Path(store), source="one", workers=0)
    error = rig.bind(seeded(Attention)).error(random(2, 5, 16), random(2, 7, 16, seed=1))
    counters = rig.cache.stats.counters
    found[name] = {"backend": backend.name, "why": why, "error": error, "loads": counters.region_loads,
        "calls": counters.region_calls}
print(json.dumps(found))
"""

# What is left without a name, by what the table says of it: the backend, and whether regions are kept.
LEFT = {
    Feature.CALLS: ("eager", False),
    Feature.COMPILING: ("eager", False),
    Feature.KEEPING: ("inductor", False),
    Feature.WORKERS: ("inductor", True),
    Feature.GPU_WORKERS: ("inductor", True),
    Feature.ADDRESSES: ("inductor", True),
    Feature.HOST_VALUES: ("inductor", True),
    Feature.RECOVERY: ("inductor", True),
    Feature.SPEED: ("inductor", True),
}


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, object]]:
    """What one process found, by the name that it lacked."""
    printed = run_python(PROGRAM, tmp_path_factory.mktemp("stores") / "store", "nothing", *NAMES)
    found: dict[str, dict[str, object]] = json.loads(printed.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_name_costs_what_the_table_says_and_no_prompt(
    without: dict[str, dict[str, object]], name: str
) -> None:
    found, feature = without[name], NAMES[name].feature
    backend, keeps = LEFT[feature]
    assert found["error"] <= 1e-4  # type: ignore[operator]
    assert (found["backend"], found["loads"]) == (backend, int(keeps))
    assert found["calls"] == (backend == "inductor"), "the region ran compiled, unless nothing can be"
    told = feature in (Feature.CALLS, Feature.COMPILING, Feature.KEEPING, Feature.WORKERS)
    assert (feature.value in str(found["why"])) == told
    assert ("torch.gone" in str(found["why"])) == told


def test_this_torch_lacks_nothing() -> None:
    without_triton = set[Feature]() if find_spec("triton") else {Feature.ADDRESSES}
    assert private_names.why_unavailable(*set(Feature) - {Feature.SPEED, Feature.GPU_WORKERS} - without_triton) == ""
    before_2_10 = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 10)
    assert bool(private_names.why_unavailable(Feature.GPU_WORKERS)) == before_2_10
    assert private_names.foreach_copy is torch._foreach_copy_


@pytest.mark.parametrize("module", ["json", "no_such_module"])
def test_other_threads_have_python_often_while_one_imports(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    usual, seen = sys.getswitchinterval(), []
    monkeypatch.setattr(
        private_names.importlib,
        "import_module",
        lambda name: (seen.append(sys.getswitchinterval()), __import__(name))[1],
    )
    private_names._cached_look_up.__wrapped__(replace(NAMES["pytree"], module=module, members=()))
    assert seen == [pytest.approx(private_names._SWITCH_SECONDS)]
    assert sys.getswitchinterval() == usual


@pytest.fixture
def lacking(monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """`lacking(name)`: this torch has another name for it."""

    def look_up_again() -> None:
        private_names._cached_look_up.cache_clear()
        private_names.why_unavailable.cache_clear()

    def rename(name: str) -> None:
        rows = [replace(each, attribute="Renamed") if each.name == name else each for each in private_names._TABLE]
        monkeypatch.setattr(private_names, "_TABLE", tuple(rows))
        look_up_again()

    yield rename
    look_up_again()


@pytest.mark.parametrize(("allocator", "captures"), [("cudaMallocAsync", False), ("native", True)])
def test_a_renamed_launcher_of_kernels_ends_captures_aloud_and_only_where_it_is_needed(
    lacking: object, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, allocator: str, captures: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: allocator)
    monkeypatch.setattr(inductor_backend, "lack_of", lambda device: None)
    inductor_backend._warn_once.cache_clear()
    lacking("CachingAutotuner")  # type: ignore[operator]
    can = registry.get("inductor").probe("cuda")
    assert can.available
    assert can.captures == captures
    assert ("triton_heuristics.Renamed" in can.detail) == (not captures)
    assert ("are not captured" in caplog.text) == (not captures)


def test_a_torch_above_the_newest_tested_one_is_named_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    inductor_backend._warn_once.cache_clear()
    monkeypatch.setattr(torch, "__version__", "9.1.0")
    _, _, why = registry.resolve("auto", "cpu")
    registry.resolve("auto", "cpu")
    assert "torch 9.1.0 is newer than" in why
    assert caplog.text.count("torch 9.1.0 is newer than") == 1


def test_a_kernel_is_known_by_its_class_and_a_subclass_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    class Kernel:
        launchers = ()

    class Debugged(Kernel): ...

    monkeypatch.setattr(compiled_region, "CachingAutotuner", Kernel)
    module = ModuleType("generated")
    module.kernel, module.other = Debugged(), object()  # type: ignore[attr-defined]
    assert list(launch_by_address([module])) == ["kernel"]
    assert isinstance(module.kernel, KernelByAddress)


def test_a_name_that_is_not_in_the_table_is_a_mistake_of_ours() -> None:
    with pytest.raises(AttributeError, match="add it to its table"):
        private_names.no_such_name  # noqa: B018
