"""The shared code of the benchmarks: counters, errors, and what a result file says."""

from __future__ import annotations

import json
from pathlib import Path

import numpy

from benchmarks import rig


def test_the_rise_of_the_counters_names_only_bypasses_that_rose() -> None:
    before = {"replays": 3, "stall_seconds": 1.5, "bypasses": {"known": 2, "gone": 1}}
    after = {"replays": 7, "stall_seconds": 2.0, "bypasses": {"known": 2, "gone": 1, "new": 4}}
    assert rig.rise(before, after) == {"replays": 4, "stall_seconds": 0.5, "bypasses": {"new": 4}}


def test_the_error_is_relative() -> None:
    assert rig.error(numpy.array([3.0, 4.0]), numpy.array([3.0, 4.0])) == 0.0
    assert rig.error(numpy.array([0.0, 4.0]), numpy.array([3.0, 4.0])) == 0.6


def test_only_our_nodes_differ_between_contenders() -> None:
    size = (1024, 768, 2, "a lighthouse")
    stock, ours = rig.prompt("x.safetensors", size), rig.compiled(rig.prompt("x.safetensors", size), "inductor")
    assert ours.keys() - stock.keys() == {"compile", "compile_vae"}
    assert stock["sample"]["inputs"].pop("model") == ["load", 0]
    assert ours["sample"]["inputs"].pop("model") == ["compile", 0]
    assert ours["sample"] == stock["sample"]
    assert (stock["decode"]["inputs"]["vae"], ours["decode"]["inputs"]["vae"]) == (["load", 2], ["compile_vae", 0])
    assert ours["latent"] == rig.node("EmptyLatentImage", width=1024, height=768, batch_size=2)


def test_a_lora_is_between_the_model_and_its_compiler() -> None:
    nodes = rig.compiled(rig.with_lora(rig.prompt("x", (64, 64, 1, "")), "y", 0.5), "inductor")
    assert (nodes["compile"]["inputs"]["model"], nodes["lora"]["inputs"]["model"]) == (["lora", 0], ["load", 0])


def test_a_result_has_no_path_of_this_machine(tmp_path: Path) -> None:
    assert rig.without_paths(["--front-end-root", str(tmp_path), "--cpu"]) == ["--front-end-root", "FOLDER", "--cpu"]


def test_a_result_is_written_where_a_file_was_named(tmp_path: Path) -> None:
    rig.save(None, {"rows": []})
    rig.save(tmp_path / "x.json", {"rows": [1]})
    assert json.loads((tmp_path / "x.json").read_text("utf-8")) == {"rows": [1]}
