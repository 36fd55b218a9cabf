"""Shapes outlive the process as plain JSON, and a file that says nonsense is as good as none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compile_cache.keys import GraphKey, Role, Signature, TensorSpec
from compile_cache.shape_memory import ShapeMemory


class Regions:
    """A program that ran through these."""

    def __init__(self, keys: list[str]) -> None:
        self.region_keys = frozenset(keys)


MODEL = "abcdef0123456789" * 4
OTHER = "0123456789abcdef" * 4


def key(side: int = 8, model: str = MODEL, role: Role = Role.UNET, **more: Any) -> GraphKey:
    tensors = (
        ("latent", TensorSpec((2, 4, side, side), "float16", "cuda", "channels_last")),
        ("context", TensorSpec((2, 77, 768), "float16", "cuda")),
    )
    values = (("control", ("input", "output")), ("guidance", 3.5), ("y", None), ("flag", True), ("steps", 2))
    return GraphKey(Signature(tensors, values), role, model, "inductor", **more)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "shapes"


def test_another_process_recalls_the_very_same_keys_latest_use_last(folder: Path) -> None:
    first = ShapeMemory(folder)
    first.name(MODEL, "SDXL")
    keys = [key(8), key(16), key(8, role=Role.DEEPCACHE_FULL), key(8, options=(("precision", "high"),))]
    for each in keys:
        first.note(each, Regions(["r1", "r2"]), 0.2)
    found = ShapeMemory(folder).recall(MODEL)
    assert [each.key for each in found] == keys
    assert [hash(each.key) for each in found] == [hash(each) for each in keys]
    assert found[0].regions == {"r1", "r2"}
    assert found[0].seconds == 0.2


def test_models_are_told_by_name_the_one_used_last_first(folder: Path) -> None:
    memory = ShapeMemory(folder)
    memory.name(MODEL, "SDXL")
    memory.note(key(), Regions(["a", "b"]))
    memory.note(key(16), Regions(["b", "c"]))
    memory.note(key(model=OTHER), Regions([]))
    assert [(model.name, len(model.graphs), model.regions) for model in ShapeMemory(folder).models()] == [
        ("a model", 1, frozenset()),
        ("SDXL", 2, {"a", "b", "c"}),
    ]


def test_what_is_used_again_comes_last_and_keeps_the_seconds_of_its_capture(folder: Path) -> None:
    first = ShapeMemory(folder)
    first.note(key(8), Regions(["r"]), 0.5)
    first.note(key(16), Regions(["r"]), 0.25)
    ShapeMemory(folder).note(key(8), Regions(["r"]))
    assert [(each.key, each.seconds) for each in ShapeMemory(folder).recall(MODEL)] == [(key(16), 0.25), (key(8), 0.5)]


def test_two_processes_add_to_one_file(folder: Path) -> None:
    one, two = ShapeMemory(folder), ShapeMemory(folder)
    one.note(key(8), Regions([]))
    two.note(key(16), Regions([]))
    one.note(key(24), Regions([]))
    assert [each.key for each in one.recall(MODEL)] == [key(8), key(16), key(24)]


def test_the_number_of_shapes_is_bounded_and_the_oldest_go(folder: Path) -> None:
    memory = ShapeMemory(folder)
    for side in range(1, 101):
        memory.note(key(side), Regions([]))
    kept = [each.key for each in memory.recall(MODEL)]
    assert kept == [key(side) for side in range(37, 101)]


def test_a_key_is_written_once_in_each_process(folder: Path) -> None:
    memory = ShapeMemory(folder)
    memory.note(key(), Regions([]))
    (file,) = folder.iterdir()
    file.unlink()
    memory.note(key(), Regions([]))
    assert list(folder.iterdir()) == []


def test_without_a_folder_nothing_is_remembered() -> None:
    memory = ShapeMemory(None)
    memory.note(key(), Regions([]))
    assert memory.recall(MODEL) == ()
    assert memory.models() == []


def test_a_folder_that_cannot_be_written_costs_the_memory_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "shapes").write_text("in the way")
    memory = ShapeMemory(tmp_path / "shapes")
    memory.note(key(), Regions([]))
    memory.note(key(16), Regions([]))
    assert "shapes are not remembered any more" in caplog.text
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: data.update(format=2),
        lambda data: data.pop("graphs"),
        lambda data: data["graphs"][0].update(role="sculptor"),
        lambda data: data["graphs"][0].update(regions=[7]),
        lambda data: data["graphs"][0].update(values=[["name", {"a": 1}]]),
        lambda data: data["graphs"][0]["tensors"][0][1].update(shape="large"),
        lambda data: data["graphs"][0]["tensors"][0][1].update(address=1),
        lambda data: data.update(model=OTHER),
    ],
    ids=["future", "no graphs", "role", "region", "value", "shape", "field", "another model"],
)
def test_a_file_that_says_something_else_is_as_good_as_none(folder: Path, spoil: Callable[[Any], Any]) -> None:
    ShapeMemory(folder).note(key(), Regions(["r"]))
    (file,) = folder.iterdir()
    data = json.loads(file.read_text())
    spoil(data)
    file.write_text(json.dumps(data))
    assert ShapeMemory(folder).recall(MODEL) == ()
    memory = ShapeMemory(folder)
    memory.note(key(16), Regions([]))
    assert [each.key for each in memory.recall(MODEL)] == [key(16)]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"7"])
def test_a_damaged_file_is_as_good_as_none(folder: Path, content: bytes) -> None:
    folder.mkdir()
    (folder / f"{MODEL[:16]}.json").write_bytes(content)
    memory = ShapeMemory(folder)
    assert memory.models() == []
    memory.note(key(), Regions([]))
    assert [each.key for each in memory.recall(MODEL)] == [key()]
