"""Real backends on small modules; no ComfyUI."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from compile_cache.backends.inductor.backend import InductorBackend

from .rig import Bound, Model, Rig, inputs, seeded

ROOT = Path(__file__).resolve().parents[2]
PACK = "resolute_under_test"


@pytest.fixture(scope="module")
def inductor() -> InductorBackend:
    """One backend, and so one table of compiled regions, for all tests of a file."""
    return InductorBackend()


@pytest.fixture
def rig(inductor: InductorBackend) -> Rig:
    """Regions compiled by earlier tests of the file, counters at zero."""
    return Rig(inductor)


@pytest.fixture
def cold() -> Rig:
    """No region compiled yet."""
    return Rig(InductorBackend())


@pytest.fixture
def warm(rig: Rig) -> Bound:
    """The model, its two distinct regions compiled."""
    bound = rig.bind(seeded(Model))
    bound(*inputs())
    assert bound.program.regions == (2, 2)
    return bound


@pytest.fixture(scope="session")
def adapter() -> Iterator[Callable[[str], ModuleType]]:
    """`adapter("patch.call_description")`: a module of nodes/adapters, imported as part of the pack, as ComfyUI does.

    Only for modules that need no ComfyUI. The pack's own copy of `compile_cache` comes with it: compare codes by value.
    """
    spec = importlib.util.spec_from_file_location(PACK, ROOT / "__init__.py", submodule_search_locations=[str(ROOT)])
    assert spec is not None
    assert spec.loader is not None
    sys.modules[PACK] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[PACK])
    # The models of these tests stand for core's.
    packs = importlib.import_module(f"{PACK}.nodes.adapters.trust.packs")
    packs.KNOWN_PACKAGES = packs.KNOWN_PACKAGES | {__name__.partition(".")[0]}
    yield lambda name: importlib.import_module(f"{PACK}.nodes.adapters.{name}")
    for name in [name for name in sys.modules if name.partition(".")[0] == PACK]:
        del sys.modules[name]


@pytest.fixture
def comfy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The little of ComfyUI that adapters without a model ask for: memory, folders, and what a Cancel is."""
    answers = SimpleNamespace(
        get_torch_device=lambda: torch.device("cpu"),
        get_total_memory=lambda device: 2**34,
        get_free_memory=lambda device: 2**33,
        InterruptProcessingException=InterruptedError,
        throw_exception_if_processing_interrupted=lambda: None,
        processing_interrupted=lambda: False,
        pytorch_attention_enabled_vae=lambda: True,
    )
    package = ModuleType("comfy")
    package.__path__ = []
    folders = SimpleNamespace(
        get_system_user_directory=lambda name: str(tmp_path / name), get_user_directory=lambda: str(tmp_path)
    )
    monkeypatch.setitem(sys.modules, "folder_paths", folders)  # type: ignore[arg-type]
    package.model_management = answers  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "comfy", package)
    monkeypatch.setitem(sys.modules, "comfy.model_management", answers)  # type: ignore[arg-type]
    package.utils = SimpleNamespace(ProgressBar=lambda total, node_id=None: None)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "comfy.utils", package.utils)
    dynprompt = SimpleNamespace(all_node_ids=set, has_node=lambda name: False)
    progress = SimpleNamespace(get_progress_state=lambda: SimpleNamespace(prompt_id="", dynprompt=dynprompt))
    monkeypatch.setitem(sys.modules, "comfy_execution", SimpleNamespace(progress=progress))  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "comfy_execution.progress", progress)  # type: ignore[arg-type]
    package.patcher_extension = SimpleNamespace(WrappersMP=None)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "comfy.patcher_extension", package.patcher_extension)
    package.ops = SimpleNamespace()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "comfy.ops", package.ops)
    attention = SimpleNamespace(optimized_attention=len, REGISTERED_ATTENTION_FUNCTIONS={"pytorch": len})
    monkeypatch.setitem(sys.modules, "comfy.ldm.modules.attention", attention)  # type: ignore[arg-type]
    package.cli_args = SimpleNamespace(args=SimpleNamespace())  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "comfy.cli_args", package.cli_args)
