"""Benchmarks of a server, with one that answers at once: they write each cell, and go on with what the file lacks."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest

from benchmarks import half_precision, restart, rig, small_cards, soak, tour
from scripts.errors import PromptError, ServerError
from scripts.models import generated
from scripts.setup import command

ABOUT = {"date": "today", "gpu": "a GPU", "system": {}}


class Server:
    """Counts how often one is started."""

    started: list[Path] = []

    def __init__(self, *given: Any, **settings: Any) -> None:
        self.folder = next(each for each in given if isinstance(each, Path))
        self.client = SimpleNamespace(get=lambda path: {"events": [], "attention": []})

    def __enter__(self) -> Server:
        self.started.append(self.folder)
        return self

    def __exit__(self, *_: Any) -> None: ...


@pytest.fixture(autouse=True)
def _server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    setup = SimpleNamespace(python=Path(sys.executable), comfyui=tmp_path)
    monkeypatch.setattr(command, "prepare", lambda: setup)
    monkeypatch.setattr(generated, "ensure", lambda kind, python, comfyui: tmp_path / f"{kind}.safetensors")
    monkeypatch.setattr(rig, "server", lambda setup, folder, arguments, **settings: Server(folder))
    monkeypatch.setattr(restart, "environment", lambda server: dict(ABOUT))
    Server.started.clear()
    yield


def test_a_restart_is_measured_by_contender(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = [True]

    def visit(server: Any, checkpoint: str, backend: str, sizes: list[Any]) -> Iterator[dict[str, Any]]:
        if backend == "inductor" and broken:
            raise ServerError("ComfyUI ended")
        for size in sizes:
            counters = {"region_compiles": 0, "region_loads": 0}
            yield {"width": size[0], "height": size[1], "seconds": [2.0, 1.0], "counters": counters}

    monkeypatch.setattr(restart, "visit", visit)
    out = tmp_path / "restart.json"
    words = ["--cpu", "--pause", "0", "--sizes", "1", "--contenders", "stock", "resolute", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["restart", *words])
    restart.main()
    assert json.loads(out.read_text("utf-8"))["failed"] == {"resolute": "ComfyUI ended"}
    assert [folder.name for folder in Server.started] == ["cold", "restart", "cold"]
    broken.clear()
    restart.main()
    assert len(Server.started) == 5
    found = json.loads(out.read_text("utf-8"))
    assert [row["contender"] for row in found["rows"]] == ["stock", "resolute"]
    assert [len(process["rows"]) for process in found["rows"][1]["processes"]] == [1, 2]
    assert (found["failed"], found["gpu"]) == ({}, "a GPU")


def test_a_size_that_is_cut_before_stock_keeps_our_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def measure(client: Any, make: Any, repeats: int) -> dict[str, Any]:
        nodes = make(seed=1)
        asked.append("resolute" if "compile" in nodes else "stock")
        counters = {"stall_seconds": 0.1, "region_compiles": 0, "captures": 1, "replays": 5, "bypasses": {}}
        return {"seconds": [2.0] * repeats, "counters": counters, "latents": numpy.full(4, float(len(asked)))}

    monkeypatch.setattr(tour, "measure", measure)
    size = (64, 64, 1, "a lighthouse")
    rows = [dict(row) for row in tour.visit(SimpleNamespace(), "file", size, ["inductor"], rig.EULER)]  # type: ignore[arg-type]
    assert asked == ["resolute", "resolute", "stock", "stock"]
    assert [row["lacks"] for row in rows] == [["stock"], []]
    assert rows[0].keys() == rows[1].keys() - {"stock"}
    assert rows[1]["inductor"]["latent_error"] == pytest.approx(2 / 3)
    assert [len(tour.table(rows[place:][:1], ["inductor"]).splitlines()) for place in (0, 1)] == [2, 3]


def test_a_small_card_that_is_cut_before_stock_keeps_our_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = [True]
    asked: list[str] = []

    def measure(cell: Any, contender: str, *given: Any) -> dict[str, Any]:
        asked.append(contender)
        if contender == "stock" and broken:
            raise ServerError("ComfyUI ended")
        run = {"seconds": 1.0, "captures": 0, "bypasses": {}, "capture_mib": 0, "peak_gib": 1.0}
        sizes = [
            {"seconds": 1.0, "peak_gib": 1.0, "runs": [run | {"latents": numpy.full(4, len(asked) + place)}]}
            for place in range(2)
        ]
        return {"sizes": sizes, "after_unload_gib": 1.0}

    monkeypatch.setattr(small_cards, "measure", measure)
    monkeypatch.setattr(small_cards, "prepare", lambda kinds, setup, options: dict.fromkeys(kinds, "file"))
    monkeypatch.setattr(small_cards, "compile_all", lambda *given: None)
    out = tmp_path / "cards.json"
    words = ["--cpu", "--cells", "sdxl:8", "--out", str(out), "--folder", str(tmp_path / "cards")]
    monkeypatch.setattr(sys, "argv", ["small_cards", *words])
    small_cards.main()
    found = json.loads(out.read_text("utf-8"))
    assert [(row["resolute"], row["failed"]) for row in found["rows"]] == [(1.0, "no figure of stock")] * 2
    broken.clear()
    small_cards.main()
    found = json.loads(out.read_text("utf-8"))
    assert asked == ["inductor", "stock"] * 2
    assert [(row["ratio"], "failed" in row) for row in found["rows"]] == [(1.0, False)] * 2
    errors = [row["resolute_detail"]["runs"][0]["error"] for row in found["rows"]]
    assert errors == [pytest.approx(1 / 4), pytest.approx(1 / 5)]


def test_a_soak_goes_on_after_a_prompt_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def run(client: Any, visit: Any, backend: str, steps: int, files: Any) -> dict[str, Any]:
        asked.append(backend)
        if len(asked) == 3:
            raise PromptError("out of memory")
        numbers = {"captures": 0, "replays": 0, "region_compiles": 0, "seconds": 1.0, "stall": 0.0, "bypasses": {}}
        return {**numbers, "latents": numpy.ones(4)}

    monkeypatch.setattr(soak, "run", run)
    monkeypatch.setattr(rig, "counters", lambda client: {"evictions": 0})
    monkeypatch.setattr(rig, "environment", lambda server: dict(ABOUT))
    monkeypatch.setattr(Server, "process", SimpleNamespace(pid=os.getpid()), raising=False)
    out = tmp_path / "soak.json"
    monkeypatch.setattr(sys, "argv", ["soak", "--cpu", "--prompts", "8", "--every", "4", "--out", str(out)])
    soak.main()
    found = json.loads(out.read_text("utf-8"))
    assert asked.count("stock") == 2
    assert [each["failed"] for each in found["errors"]] == ["out of memory"]
    assert (len(found["rows"]), found["summary"]["prompts"], found["summary"]["worst_error"]) == (7, 7, 0.0)


def test_errors_of_half_precision_are_measured_by_case_dtype_and_rounding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    broken = [True]

    def errors(bench: Any, workflow: Any, backends: list[str]) -> dict[str, float]:
        asked.append(workflow)
        if broken and len(asked) == 2:
            raise PromptError("out of memory")
        return {"own to float32": 0.01, "inductor to own": 0.1, "inductor to float32": 0.01 * workflow.seed}

    monkeypatch.setattr(half_precision, "errors", errors)
    monkeypatch.setattr(half_precision.loras, "write", lambda folder: None)
    monkeypatch.setattr(rig, "environment", lambda server: dict(ABOUT))
    out = tmp_path / "half.json"
    words = ["half", "--cpu", "--bf16", "--out", str(out)]
    cases = 3 * len(half_precision.WORKFLOWS)
    monkeypatch.setattr(sys, "argv", words)
    assert half_precision.main() == 1
    found = json.loads(out.read_text("utf-8"))
    assert (len(asked), len(found["rows"]), list(found["failed"])) == (cases, cases - 1, ["default, seed 2"])
    broken.clear()
    for _ in range(2):
        assert half_precision.main() == 0
    assert (len(asked), len(Server.started)) == (cases + 1, 2)
    monkeypatch.setattr(sys, "argv", [*words, "--precision-casts", "--seconds", "0"])
    assert half_precision.main() == 0
    found = json.loads(out.read_text("utf-8"))
    assert (len(found["rows"]), len(found["left"]), found["failed"]) == (cases, cases, {})
    assert found["worst_ratios"] == {"bfloat16": {"inductor": 3.0}}
