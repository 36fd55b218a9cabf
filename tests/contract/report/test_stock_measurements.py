"""Seconds and pictures of Measure against stock, kept for a model, a size and a device."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

PICTURE = torch.linspace(0, 1, 48).reshape(1, 4, 4, 3)
RUN: dict[str, Any] = {
    "model": "SDXL", "structure": "abc", "size": "1024x1024", "steps": 20, "role": "unet", "seconds": 1.0,
    "file": "sdxl.safetensors", "prompt_id": "p", "counts": {"replays": 20, "graph_calls": 0}, "reasons": [],
    "lines": ["Compiled, 50 ms/step"], "bypasses": {},
}  # fmt: skip


@pytest.fixture
def measured(
    adapter: Callable[[str], ModuleType], comfy: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[ModuleType]:
    module = adapter("report.stock_measurements")
    store = SimpleNamespace(config=SimpleNamespace(store_folder=tmp_path / "store"))
    monkeypatch.setattr(module.runtime, "cache", lambda: store)
    monkeypatch.setattr(module.runtime, "device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(module.runs, "latest", lambda: [RUN])
    restart(module)
    yield module
    restart(module)


def restart(module: ModuleType) -> None:
    module._kept.cache_clear()


def file_of_measurements(folder: Path) -> Path:
    (path,) = (folder / "store" / "measured").iterdir()
    return path


def body(**changes: Any) -> dict[str, Any]:
    return {"measure": "1", "prompt_id": "p", "seconds": [1.1], "stock_seconds": [3.19], **changes}


def test_the_result_says_seconds_ratio_and_how_alike_the_pictures_are(measured: ModuleType) -> None:
    measured.keep_picture("1", "on", PICTURE)
    measured.keep_picture("1", "off", (PICTURE + 1 / 255).clamp(0, 1))
    found = measured.finish(body())
    assert found.result() == "1.1 s, 2.9x stock (3.2 s), same picture (PSNR 48 dB)"
    summary = adapter_run(measured)
    assert measured.of(summary()) == found
    others = ({"size": "512x512"}, {"structure": "other"}, {"structure": ""}, {"steps": 4}, {"file": "another file"})
    assert [measured.of(summary(**other)) for other in others] == [None] * 5
    assert re.fullmatch(r"1\.1 s, 2\.9x stock \(3\.2 s\), measured on \d{4}-\d\d-\d\d", found.on_node())
    assert [each["text"] for each in measured.here()] == [f"1024x1024: {found.result()}"]


def test_the_nodes_of_its_workflow_show_the_result_after_a_reload_and_odd_names_keep_nothing(
    measured: ModuleType,
) -> None:
    measured.messages._latest.clear()
    for arm in ("on", "off"):
        measured.keep_picture("1", arm, PICTURE)
    found = measured.finish(body(workflow="w", nodes=["8", "12:3"]))
    kept = measured.messages.latest_texts()
    assert list(kept) == ["w"] and list(kept["w"]) == ["8", "12:3"]
    picture = "identical picture"
    assert kept["w"]["8"]["text"] == f"1024x1024: 1.1 s, 2.9x stock (3.2 s), {picture}, measured on {found.date}"
    measured.messages._latest.clear()
    for odd in ({"nodes": ["8"]}, {"workflow": None, "nodes": ["8"]}, {"workflow": "w", "nodes": 8}, {"workflow": "w"}):
        measured.finish(body(**odd))
    measured.finish(body(workflow="00000000-0000-0000-0000-000000000000", nodes=["8"]))  # loaded as a prompt
    assert measured.messages.latest_texts() == {}


@pytest.mark.parametrize(
    ("extra", "workflow"),
    [
        ({"extra_pnginfo": {"workflow": {"id": "w"}}, "resolute_workflow": "of a measure"}, "w"),
        ({"resolute_workflow": "of a measure"}, "of a measure"),
        ({"extra_pnginfo": [1]}, ""),
        (["resolute_workflow"], ""),
    ],
)
def test_a_prompt_of_a_measure_names_its_workflow_and_odd_data_name_none(
    measured: ModuleType, monkeypatch: pytest.MonkeyPatch, extra: Any, workflow: str
) -> None:
    server = SimpleNamespace(prompt_queue=SimpleNamespace(currently_running={1: (0, "p", {}, extra, [])}))
    monkeypatch.setattr(measured.messages, "_server", lambda: server)
    assert measured.messages.running_workflow() == workflow


def test_another_picture_is_called_so_and_without_one_no_difference_is_said(measured: ModuleType) -> None:
    measured.keep_picture("1", "on", PICTURE)
    measured.keep_picture("1", "off", 1 - PICTURE)
    assert measured.finish(body()).result().endswith(", another picture (PSNR 5 dB)")
    measured.keep_picture("1", "on", PICTURE)
    measured.keep_picture("1", "off", PICTURE[:, :2])
    assert measured.finish(body()).result().endswith(", another picture (PSNR 0 dB)"), "of another size"
    measured.keep_picture("2", "on", {"samples": PICTURE})
    measured.keep_picture("2", "off", {"samples": PICTURE})
    assert measured.finish(body(measure="2")).result() == "1.1 s, 2.9x stock (3.2 s)"


def said_of(measured: ModuleType, ours: torch.Tensor, stock: torch.Tensor) -> str:
    measured.keep_picture("1", "on", ours)
    measured.keep_picture("1", "off", stock)
    return str(measured.finish(body()).result()).partition("(3.2 s)")[2]


@pytest.mark.parametrize(
    ("psnr", "said"),
    [
        (39.6, "same picture (PSNR 40 dB)"),
        (39.4, "nearly the same picture (PSNR 39 dB)"),
        (24.6, "nearly the same picture (PSNR 25 dB)"),
        (24.4, "another picture (PSNR 24 dB)"),
    ],
)
def test_the_words_go_by_the_number_that_is_shown(measured: ModuleType, psnr: float, said: str) -> None:
    found = measured.Measurement("SDXL", "abc", "8x8", "H200", 20, 1.0, 3.0, mse=255**2 / 10 ** (psnr / 10))
    assert found.result() == f"1.0 s, 3.0x stock (3.0 s), {said}"


def test_of_a_batch_or_a_video_the_worst_frame_counts(measured: ModuleType) -> None:
    frames = PICTURE.repeat(5, 1, 1, 1)
    other = frames.clone()
    other[3] = 1 - other[3]
    assert said_of(measured, frames, frames) == ", identical picture"
    assert said_of(measured, other, frames) == ", another picture (PSNR 5 dB)", "not 12 dB, as of all frames"
    assert said_of(measured, frames[:4], frames) == ", another picture (PSNR 0 dB)"
    assert said_of(measured, frames[:0], frames[:0]) == "", "no frame at all"


def test_an_alpha_channel_counts_as_the_colours_do(measured: ModuleType) -> None:
    opaque = torch.cat([PICTURE, torch.ones(1, 4, 4, 1)], dim=-1)
    other = opaque.clone()
    other[..., 3] = 0
    assert said_of(measured, opaque, opaque) == ", identical picture"
    assert said_of(measured, opaque, other) == ", another picture (PSNR 6 dB)"


def test_a_picture_of_no_numbers_is_another_one(measured: ModuleType) -> None:
    assert said_of(measured, PICTURE * float("nan"), PICTURE) == ", another picture (PSNR 5 dB)"


def test_the_latest_picture_of_an_arm_counts_and_a_cancel_forgets_them(measured: ModuleType) -> None:
    measured.keep_picture("1", "on", 1 - PICTURE)  # of the first prompt, which compiles
    measured.keep_picture("1", "on", PICTURE)
    measured.keep_picture("1", "off", PICTURE)
    assert measured.finish({"measure": "1"}) is None
    assert (measured._pictures, measured.here()) == ({}, [])
    measured.keep_picture("2", "on", 1 - PICTURE)
    measured.keep_picture("2", "on", PICTURE)
    measured.keep_picture("2", "off", PICTURE)
    assert "identical picture" in measured.finish(body(measure="2")).result()


def test_they_are_kept_over_a_restart_for_their_device(
    measured: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = measured.finish(body())
    restart(measured)
    assert measured.of(adapter_run(measured)()) == found
    monkeypatch.setattr(measured.runtime, "device_name", lambda: "cpu")
    assert (measured.of(adapter_run(measured)()), measured.here()) == (None, [])
    path = file_of_measurements(tmp_path)
    kept = json.loads(path.read_text("utf-8"))
    ((key, value),) = kept["entries"]
    earlier = {name: each for name, each in value.items() if name not in ("spread", "prompts")}
    path.write_text(json.dumps({**kept, "entries": [[key, earlier]]}), "utf-8")
    restart(measured)
    monkeypatch.setattr(measured.runtime, "device_name", lambda: "NVIDIA H200")
    assert measured.of(adapter_run(measured)()) == found, "a file from before these two were measured"


@pytest.mark.parametrize(
    ("seconds", "stock", "said"),
    [
        ([0.31, 0.30, 0.90], [0.62, 0.60, 0.61], "0.31 s, no clear difference from stock (0.61 s)"),
        ([0.31, 0.30, 0.32, 0.30, 0.90, 0.31, 0.31, 0.30], [0.62, 0.60] * 4, "0.31 s, 2.0x stock (0.61 s)"),
        ([0.20, 0.30, 0.26, 0.36], [0.22, 0.34, 0.29, 0.39], "0.28 s, no clear difference from stock (0.32 s)"),
        (
            [0.30, 0.30, 0.30],
            [0.20, 0.20, 0.20],
            "stock 0.20 s, Resolute 0.30 s: slower here, because this model gains nothing on this GPU",
        ),
        ([2.0], [2.04], "2.0 s, no clear difference from stock (2.0 s)"),
        ([2.0], [2.2], "2.0 s, 1.1x stock (2.2 s)"),
    ],
)
def test_medians_count_and_a_difference_that_the_spread_hides_is_no_factor(
    measured: ModuleType, seconds: list[float], stock: list[float], said: str
) -> None:
    found = measured.finish(body(seconds=seconds, stock_seconds=stock))
    assert (found.result(), found.prompts) == (said, len(seconds))
    assert (found.ratio == 1.0) == ("no clear difference" in said)
    assert measured.here()[0]["text"] == f"1024x1024: {said}"


@pytest.mark.parametrize(
    ("device", "bypasses", "why"),
    [
        ("cpu", {"left_out": 4}, "a CPU gains nothing"),
        ("NVIDIA H200", {"patched_block": 4}, "another node changes attention: some blocks run eager"),
    ],
)
def test_a_slower_prompt_says_why(
    measured: ModuleType, monkeypatch: pytest.MonkeyPatch, device: str, bypasses: dict[str, int], why: str
) -> None:
    monkeypatch.setattr(measured.runtime, "device_name", lambda: device)
    monkeypatch.setattr(measured.runs, "latest", lambda: [{**RUN, "bypasses": bypasses}])
    found = measured.finish(body(seconds=[5.9], stock_seconds=[4.7]))
    assert found.result() == f"stock 4.7 s, Resolute 5.9 s: slower here, because {why}"
    restart(measured)
    assert measured.here()[0]["text"] == f"1024x1024: {found.result()}"


DAMAGES: list[Callable[[str], str]] = [
    lambda text: "",
    lambda text: text[:-9],
    lambda text: "[1]",
    lambda text: text.replace('"seconds": 1.1', '"seconds": 0'),
    lambda text: text.replace('"steps": 20, ', ""),
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_costs_only_the_figures(
    measured: ModuleType, tmp_path: Path, damage: Callable[[str], str]
) -> None:
    measured.finish(body())
    path = file_of_measurements(tmp_path)
    whole = path.read_text("utf-8")
    path.write_text(damage(whole), "utf-8")
    assert path.read_text("utf-8") != whole
    restart(measured)
    assert measured.here() == []
    measured.finish(body())
    assert len(measured.here()) == 1


@pytest.mark.parametrize(
    "seconds", [1.0, [], None, "1", *([1.0, each] for each in (0, -1, float("nan"), float("inf"), True, "1", None))]
)
def test_seconds_that_are_none_are_refused(measured: ModuleType, seconds: object) -> None:
    with pytest.raises(Exception, match="must be a list of seconds, each a number above 0"):
        measured.finish(body(seconds=seconds))
    assert measured.here() == []


def test_a_prompt_in_which_nothing_ran_compiled_gives_no_figure(
    measured: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    eager = {**RUN, "counts": {"replays": 0, "graph_calls": 0}, "reasons": ["Another pack answers."]}
    monkeypatch.setattr(measured.runs, "latest", lambda: [eager])
    with pytest.raises(Exception, match=r"Nothing ran compiled.*Another pack answers\."):
        measured.finish(body())
    plain = {**eager, "reasons": [], "lines": ["ran uncompiled, 50 ms/step", "backend: eager, as chosen"]}
    monkeypatch.setattr(measured.runs, "latest", lambda: [plain])
    with pytest.raises(Exception, match=r"Nothing ran compiled.*backend: eager, as chosen"):
        measured.finish(body())


def adapter_run(measured: ModuleType) -> Callable[..., Any]:
    usual: dict[str, Any] = {
        "model": "SDXL", "structure": "abc", "file": "sdxl.safetensors", "role": "unet", "batch": 1, "steps": 20,
        "started": 0.0, "seconds": 1.0, "waited": 0.0, "counts": {}, "cell": 8, "stopped": False,
    }  # fmt: skip

    def make(size: str = "1024x1024", **changes: Any) -> Any:
        width, height = map(int, size.split("x"))
        run = measured.Run(**{**usual, "width": width, "height": height, **changes})
        assert run.size == size
        return run

    return make
