"""Random sequences of changes and events; each prompt is compared with ComfyUI's own.

This test runs a few sequences, the same each time. `scripts/fuzz` runs any number, and replays failures.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scripts.server.process import ComfyServer

pytest.register_assert_rewrite(f"{__package__}.rig", f"{__package__}.fuzz.player")
from .fuzz import loras, patches  # noqa: E402 (after register_assert_rewrite)
from .fuzz import player as playing  # noqa: E402
from .fuzz.player import Player, Unexpected  # noqa: E402
from .fuzz.search import Plan, Search  # noqa: E402
from .fuzz.workflow import Workflow  # noqa: E402
from .matrix.kit import Recorder  # noqa: E402
from .rig import Bench, Run, compile_model, with_model  # noqa: E402


@pytest.fixture
def player(server: ComfyServer, bench: Bench, warm: Run, pytestconfig: pytest.Config) -> Player:
    """Plays events on the shared server, whose tiny model and VAE are already compiled."""
    loras.write(server.folder / "models" / "loras")
    backend, on_cuda = pytestconfig.getoption("--backend"), pytestconfig.getoption("--on-cuda")
    return Player(bench, backend, on_cuda, Recorder(backend, on_cuda).tolerance)


@pytest.fixture
def search(player: Player, tmp_path: Path, pytestconfig: pytest.Config) -> Search:
    """Draws sequences. On a GPU it leaves out nodes that compare numbers, because fp16 rounding changes these, and
    nodes that ComfyUI's DynamicVRAM gets wrong.
    """
    plan, on_cuda = Plan.from_environment(), pytestconfig.getoption("--on-cuda")
    left_out = {patches.NEVER_TOGETHER[(plan.seed or 0) % 2]}
    if on_cuda:
        left_out |= {name for name, patch in patches.PATCHES.items() if patch.decides} | {*patches.WRONG_WITH_PAGES}
    return Search(player, plan.failures or tmp_path, [name for name in patches.PATCHES if name not in left_out])


@pytest.mark.timeout(0)  # hypothesis may take minutes to shorten a failing sequence
def test_no_sequence_of_changes_makes_a_result_differ_or_compile_again(
    search: Search, player: Player, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = Plan.from_environment()
    if plan.replay is not None:
        search.replay(plan.replay)
        return
    failures = search.run(plan)
    with capsys.disabled():
        print(f"\n{player.tally}")
    assert not failures, "\n\n".join(failures)
    tally = player.tally
    assert tally.compared > 0.7 * tally.prompts, "most prompts compare nothing"
    assert tally.rises["region_calls"] + tally.rises["replays"] > 0, "nothing ran compiled"


@pytest.mark.long
def test_a_second_process_without_the_patches_is_right_with_the_same_store(
    make_server: Any, pytestconfig: pytest.Config
) -> None:
    backend, on_cuda = pytestconfig.getoption("--backend"), pytestconfig.getoption("--on-cuda")
    server = make_server(cpu=not on_cuda, environment={"RESOLUTE_STORE": None})

    def play(*patched: str) -> Player:
        player = Player(Bench(server.client), backend, on_cuda, Recorder(backend, on_cuda).tolerance)
        for patch in patched:
            player.play([("open", {"steps": 2, "patches": (patch,) if patch else ()}), ("queue",)])
        return player

    exchanges = ("exchanged method", "assigned code", "global hook", *patches.SOME_STEPS)
    assert play(*exchanges).tally.compared == len(exchanges)
    server.stop()
    server.start()
    second = play("")
    server.stop()
    assert second.tally.compared == 1
    assert second.tally.rises["region_loads"] > 0 or backend != "inductor", "the first process kept nothing"


def test_the_fuzzer_detects_a_wrong_image(player: Player, monkeypatch: pytest.MonkeyPatch) -> None:
    right = playing.ours

    def wrong(*given: Any) -> Any:
        return with_model(right(*given), compile_model("eager"), patches.PATCHES["FreeU"].node)

    player.play([("queue",)])
    monkeypatch.setattr(playing, "ours", wrong)
    with pytest.raises(Unexpected, match="results differ"):
        player.play([("set", "backend", "eager"), ("queue",)])


def test_a_failing_sequence_is_written_to_a_file_and_can_be_replayed(
    search: Search, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A workflow that claims to have no Compile Model and has one.
    monkeypatch.setattr(Workflow, "sampling_backend", "none")
    with pytest.raises(Unexpected, match="went through the cache"):
        search.play([("set", "batch", 2), ("queue",)], "it")
    monkeypatch.undo()
    search.replay(tmp_path / "it-first.json")


def test_every_kind_of_the_scenario_packs_patch_is_known_to_the_fuzzer(bench: Bench) -> None:
    known = {*patches.INSIDE_BLOCKS, *patches.OUTSIDE_BLOCKS, *patches.REPLACED, *patches.SOME_STEPS, *patches.LEFT_OUT}
    schema = bench.client.get("/object_info/ResoluteTestPatch")["ResoluteTestPatch"]
    assert set(schema["input"]["required"]["kind"][0]) == known


@pytest.mark.parametrize("name", patches.PATCHES)
def test_every_patch_of_the_fuzzer_is_a_node_of_comfyui(bench: Bench, name: str) -> None:
    patch = patches.PATCHES[name]
    kind = patch.node["class_type"]
    inputs = bench.client.get("/object_info/" + kind.replace(" ", "%20"))[kind]["input"]
    given = {*patch.node["inputs"], patch.input}
    assert set(inputs["required"]) <= given <= {*inputs["required"], *inputs.get("optional", {})}
