"""The tables of backends and of model families: what is written is listed, and what is listed works."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compile_cache.backends import registry
from scripts.places import ROOT
from scripts.server.client import Client

BACKENDS = ROOT / "compile_cache" / "backends"
BLOCKS = ROOT / "nodes" / "adapters" / "blocks"


@pytest.fixture(scope="module")
def families(core: SimpleNamespace) -> Any:
    return core.ours("blocks.families")


def definitions(file: Path) -> list[ast.stmt]:
    return ast.parse(file.read_text(encoding="utf-8")).body


class TestBackends:
    def test_every_subclass_of_backend_is_listed_once(self) -> None:
        written = [
            (file.relative_to(BACKENDS).as_posix(), part.name)
            for file in BACKENDS.rglob("*.py")
            for part in definitions(file)
            if isinstance(part, ast.ClassDef) and "Backend" in {ast.unparse(base) for base in part.bases}
        ]
        made = [type(registry.get(name)) for name in registry.NAMES]
        listed = [(Path(inspect.getfile(kind)).relative_to(BACKENDS).as_posix(), kind.__name__) for kind in made]
        assert sorted(listed) == sorted(written)

    def test_the_nodes_offer_each(self, client: Client) -> None:
        known = client.get("/object_info")
        inputs = {
            name: node["input"].get("required", {}) for name, node in known.items() if name.startswith("Resolute")
        }
        offered = {name: given["backend"] for name, given in inputs.items() if "backend" in given}
        assert {
            "ResoluteCompileModel",
            "ResoluteCompileVAE",
            "ResoluteCompileVAEDecode",
            "ResoluteCompileControlNet",
        } <= offered.keys()
        for name, (_, settings) in offered.items():
            assert settings["options"] == list(registry.CHOICES), name


class TestFamilies:
    def test_every_file_with_hooks_is_listed_once(self, core: SimpleNamespace, families: Any) -> None:
        written = sorted(
            file.stem
            for file in BLOCKS.rglob("*.py")
            if any(isinstance(part, ast.FunctionDef) and part.name == "hooks" for part in definitions(file))
        )
        listed = {each.hooks for each in families.PROVIDERS}
        listed |= {each.hooks for each in core.ours("blocks.videos.known").DECODERS if each.hooks.__name__ == "hooks"}
        assert sorted(hooks.__module__.rpartition(".")[2] for hooks in listed) == written

    def test_each_leaves_a_model_of_another_kind_alone(self, families: Any) -> None:
        def never(*args: Any) -> None:
            raise AssertionError(f"called with {args}")

        for family in families.PROVIDERS:
            assert list(family.hooks(torch.nn.Sequential(torch.nn.Linear(2, 2)), never, never)) == []
