"""The stubs in `typings/`, which mypy reads in place of ComfyUI, against ComfyUI's own source."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from scripts.places import ROOT
from scripts.setup import comfyui

TYPINGS = ROOT / "typings"
STUBS = sorted(path for top in ("comfy", "comfy_api") for path in (TYPINGS / top).rglob("*.pyi"))
STUBS += sorted(TYPINGS.glob("*.pyi"))
# `comfy_api.latest.io` is a selection from this file.
ELSEWHERE = {"comfy_api/latest/io.py": "comfy_api/latest/_io.py"}
# What a stub may say beyond the source: attributes looked up by name, and the base of types with nothing of their own.
OWN = {"__getattr__", "_Type"}
# What the oldest version lacks: it does not page weights, so nothing there asks for either.
NOT_IN_OLDEST = {
    "unload_model_and_clones", "ModelPatcher.cached_patcher_init", "cast_modules_with_vbar",
    "resolve_cast_module_with_vbar", "cast_bias_weight(compute_dtype)", "cast_bias_weight(want_requant)",
}  # fmt: skip
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def definitions(body: list[ast.stmt]) -> dict[str, Definition]:
    return {part.name: part for part in body if isinstance(part, Definition)}


def names(tree: ast.AST) -> set[str]:
    """Every name that a module defines, assigns or reads, attributes too."""
    found: set[str] = set()
    for part in ast.walk(tree):
        if isinstance(part, ast.Name):
            found.add(part.id)
        elif isinstance(part, ast.Attribute):
            found.add(part.attr)
        elif isinstance(part, Definition):
            found.add(part.name)
    return found


def parameters(function: Definition) -> list[str]:
    assert not isinstance(function, ast.ClassDef)
    return [one.arg for one in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]


def missing(stub: ast.Module | ast.ClassDef, source: ast.Module | ast.ClassDef, known: set[str]) -> Iterator[str]:
    """What a stub declares and the source does not have. `known`: the names of the source's whole module."""
    real = definitions(source.body)
    for part in stub.body:
        if isinstance(part, ast.AnnAssign) and ast.unparse(part.target) not in known:
            yield ast.unparse(part.target)
        if not isinstance(part, Definition) or part.name in OWN:
            continue
        found = real.get(part.name) or real.get(part.name.removeprefix("_"))
        if isinstance(part, ast.ClassDef):
            if isinstance(found, ast.ClassDef):
                yield from (f"{part.name}.{name}" for name in missing(part, found, known))
            else:
                yield part.name
        elif found is not None:
            yield from (f"{part.name}({name})" for name in parameters(part) if name not in parameters(found))
        elif part.name == "__init__":  # a dataclass
            fields = {ast.unparse(line.target) for line in source.body if isinstance(line, ast.AnnAssign)}
            yield from (f"__init__({name})" for name in parameters(part)[1:] if name not in fields)
        else:
            yield part.name


@pytest.mark.parametrize("version", [comfyui.TARGET, pytest.param(comfyui.OLDEST, marks=pytest.mark.old)])
@pytest.mark.parametrize("stub", STUBS, ids=lambda path: path.relative_to(TYPINGS).as_posix())
def test_a_stub_declares_what_comfyui_has(stub: Path, version: str, comfyui_folder: Callable[[str], Path]) -> None:
    name = stub.relative_to(TYPINGS).with_suffix(".py").as_posix()
    path = comfyui_folder(version) / ELSEWHERE.get(name, name)
    declared = ast.parse(stub.read_text(encoding="utf-8"))
    if not path.exists() and not declared.body[1:]:
        assert path.parent.is_dir()  # a folder without `__init__.py`
        return
    source = ast.parse(path.read_text(encoding="utf-8"))
    allowed = NOT_IN_OLDEST if version == comfyui.OLDEST else set()
    assert set(missing(declared, source, names(source))) - allowed == set()
