"""A pack that a person declared is compiled and captured as core is, and only while it is what was declared."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from .kit import Bench, run_traces
from .models import Model, noise

PROJECT = """
[tool.comfy]
name = "not this one"

[project]
name = "strange-model"  # as the registry knows it
version = '1.2.0'
dependencies = ["torch"]
"""
BLOCKS = """
import torch


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.nn.functional.{activation}(self.linear(x))
"""
MODEL = """
import torch

from .blocks import Block


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(3))

    def forward(self, x, timestep, transformer_options={}):
        for block in self.blocks:
            x = block(x)
        return x
"""

# As GGUF's: a weight of a class of its own, which its layer unpacks in each call.
QUANTIZED = """
import torch


class GGMLTensor(torch.Tensor):
    pass


class Linear(torch.nn.Linear):
    def forward(self, x):
        return torch.nn.functional.linear(x, self.weight.as_subclass(torch.Tensor), self.bias)


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = Linear(8, 8)
        self.linear.weight = torch.nn.Parameter(self.linear.weight.detach().as_subclass(GGMLTensor))

    def forward(self, x):
        return x + torch.nn.functional.silu(self.linear(x))
"""


class Installed:
    """The pack in a folder, under the name that ComfyUI gives its module: the path."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.name = str(folder).replace(".", "_x_")

    def write(self, activation: str = "silu") -> None:
        for name, text in {
            "pyproject.toml": PROJECT,
            "__init__.py": MODEL,
            "blocks.py": BLOCKS.format(activation=activation),
        }.items():
            (self.folder / name).write_text(text, "utf-8")

    def start(self) -> ModuleType:
        """Import it as a new process does."""
        self.stop()
        file = self.folder / "__init__.py"
        spec = importlib.util.spec_from_file_location(self.name, file, submodule_search_locations=[str(self.folder)])
        assert spec is not None and spec.loader is not None
        sys.modules[self.name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    def stop(self) -> None:
        for name in [name for name in sys.modules if name.partition(".")[0] == self.name]:
            del sys.modules[name]


class StrangeModel(Model):
    def __init__(self, kind: type[torch.nn.Module]) -> None:
        object.__setattr__(self, "made", kind)
        super().__init__("", {}, lambda size: {"x": noise(size, 5, 8), "timestep": torch.ones(size)}, 1, 3)  # type: ignore[arg-type, return-value]

    def make(self) -> Any:
        torch.manual_seed(0)
        return self.made().eval().requires_grad_(False)  # type: ignore[attr-defined]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Installed]:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    pack = Installed(tmp_path)
    pack.write()
    yield pack
    pack.stop()


@pytest.fixture
def trusted(core: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """`trusted(entries)`: what a new process reads from RESOLUTE_TRUSTED_PACKS."""
    trust, packs = core.ours("trust.trust"), core.ours("trust.packs")

    def forget() -> None:
        for cached in (trust._trusted, packs.pack_of, packs.source_of, packs.piece_digest):
            cached.cache_clear()

    def begin(entries: str) -> None:
        monkeypatch.setenv("RESOLUTE_TRUSTED_PACKS", entries)
        forget()

    yield begin
    forget()


def declaration(core: SimpleNamespace, installed: Installed) -> str:
    return str(core.ours("trust.packs").pack_of(installed.name))


def hooks_of(core: SimpleNamespace, module: torch.nn.Module) -> tuple[list[Any], list[str]]:
    """The blocks that become regions, and why others do not."""
    reasons: list[str] = []
    found = core.ours("blocks.transformers.recognise").hooks(module, None, lambda reason: reasons.append(reason.detail))
    return list(found), reasons


def why_not_captured(core: SimpleNamespace, module: torch.nn.Module) -> str:
    trusted = core.ours("trust.trust")._trusted()
    weights = core.ours("module_state.module_state").ModuleState(module, trusted)
    weights.refresh()
    return "" if weights.blocker is None else str(weights.blocker.detail)


def test_it_runs_eagerly_until_a_person_declares_it(
    core: SimpleNamespace, installed: Installed, trusted: Callable[[str], None]
) -> None:
    model = installed.start().Model()
    trusted("")
    entry = declaration(core, installed)
    assert entry.startswith("strange-model@1.2.0:")
    hooks, reasons = hooks_of(core, model)
    assert not hooks
    for reason in (reasons[0], why_not_captured(core, model)):
        assert f"RESOLUTE_TRUSTED_PACKS={entry}" in reason
    trusted(f" {entry} ,another@1:0123456789abcdef")
    hooks, reasons = hooks_of(core, model)
    assert (len(hooks), reasons, why_not_captured(core, model)) == (3, [], "")


def test_its_blocks_compile_once_and_give_eagers_result(
    core: SimpleNamespace, installed: Installed, trusted: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_traces(core, monkeypatch)
    kind = installed.start().Model
    trusted("")
    trusted(declaration(core, installed))
    bench = Bench(core, StrangeModel(kind))
    assert bench.check(1) == bench.counts(1)  # type: ignore[arg-type]
    assert bench.check(3) == bench.counts()  # type: ignore[arg-type]


def test_a_pack_that_changed_is_refused_by_name(
    core: SimpleNamespace, installed: Installed, trusted: Callable[[str], None]
) -> None:
    installed.start()
    trusted("")
    before = declaration(core, installed)
    installed.write(activation="gelu")  # in a file that defines no model
    model = installed.start().Model()
    trusted(before)
    now = declaration(core, installed)
    assert now != before
    hooks, reasons = hooks_of(core, model)
    assert not hooks
    for reason in (reasons[0], why_not_captured(core, model)):
        assert f"strange-model changed since it was declared; now it is RESOLUTE_TRUSTED_PACKS={now}" in reason


def test_its_source_is_part_of_a_regions_key(
    core: SimpleNamespace, installed: Installed, trusted: Callable[[str], None]
) -> None:
    def structures() -> set[str]:
        model = installed.start().Model()
        trusted("")
        trusted(declaration(core, installed))
        return {hook.structure for hook in hooks_of(core, model)[0]}

    before = structures()
    assert len(before) == 1
    assert structures() == before
    installed.write(activation="gelu")  # the same classes and names
    assert structures().isdisjoint(before)


def test_a_class_of_it_that_derives_from_an_undeclared_pack_is_refused(
    core: SimpleNamespace, installed: Installed, trusted: Callable[[str], None]
) -> None:
    kind = installed.start().Model
    trusted("")
    trusted(declaration(core, installed))
    strange = type("Base", (torch.nn.Module,), {"__module__": "undeclared.models"})
    mixed = type("Mixed", (kind, strange), {"__module__": kind.__module__})
    assert "another pack wrote" in why_not_captured(core, mixed())


@pytest.mark.parametrize("name", ["strange-model", "Strange-Model"])
def test_of_a_pack_that_we_declared_only_the_classes_of_those_files_are_trusted(
    core: SimpleNamespace,
    installed: Installed,
    trusted: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    project = installed.folder / "pyproject.toml"
    project.write_text(project.read_text("utf-8").replace("strange-model", name), "utf-8")
    kind = installed.start().Model
    trusted("")
    piece, packs = core.ours("trust.declared").SourcePiece, core.ours("trust.packs")
    files = ("__init__.py", "blocks.py")
    known = [piece(file, "", frozenset({packs.piece_digest(installed.name, file, "")})) for file in files]
    monkeypatch.setattr(core.ours("trust.trust"), "CLASSES", {"strange-model": known})
    assert not why_not_captured(core, kind())
    other = type("Other", (torch.nn.Module,), {"__module__": f"{installed.name}.other"})
    assert "another pack wrote" in why_not_captured(core, torch.nn.Sequential(other()))


@pytest.mark.parametrize("missing", ["pyproject.toml", "version"])
def test_a_pack_without_a_name_and_a_version_cannot_be_declared(
    core: SimpleNamespace, installed: Installed, trusted: Callable[[str], None], missing: str
) -> None:
    file = installed.folder / "pyproject.toml"
    if missing == "version":
        file.write_text(PROJECT.replace("version =", "dynamic ="), "utf-8")
    else:
        file.unlink()
    model = installed.start().Model()
    trusted("")
    assert declaration(core, installed) == "None"
    _, reasons = hooks_of(core, model)
    assert "RESOLUTE_TRUSTED_CLASSES" in reasons[0]
    assert "RESOLUTE_TRUSTED_PACKS" not in reasons[0]


@pytest.mark.parametrize(("declared", "code"), [(True, "unreadable_weights"), (False, "foreign_model")])
def test_quantized_weights_of_a_pack_have_one_reason_and_no_call_counts_as_compiled(
    core: SimpleNamespace,
    installed: Installed,
    trusted: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    declared: bool,
    code: str,
) -> None:
    monkeypatch.setenv("RESOLUTE_WORKERS", "0")
    (installed.folder / "blocks.py").write_text(QUANTIZED, "utf-8")
    kind = installed.start().Model
    trusted("")
    if declared:
        trusted(declaration(core, installed))
    bench = Bench(core, StrangeModel(kind))
    before = bench.stats.snapshot()
    for _ in range(2):
        assert bench.check(2, bypasses={code: 1}) == {**bench.counts(calls=0), "eager_calls": 1}  # type: ignore[arg-type]
    assert bench.stats.counters.graph_calls == before["graph_calls"]  # the log would say "calls through regions"
