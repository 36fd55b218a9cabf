"""Measure against stock, the switch, and Add Resolute to this workflow, as a user sees them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from scripts.server.process import ComfyServer

from ..comfy.rig import node
from ..conftest import PACK_NAME
from .front_end import EMPTY, FrontEnd
from .prompts import FACTOR, PICTURE, compiled, stock

pytestmark = pytest.mark.browser

MEASURED = re.compile(rf"(\d+x\d+): {FACTOR}, {PICTURE}")
HEAR = """() => {
    const place = document.querySelector('.resolute-said');
    window.heard = [];
    new MutationObserver(() => window.heard.push(place.textContent)).observe(place, {childList: true});
}"""
TITLES = "() => app.graph.nodes.map(node => node.title).sort()"


def press(page: FrontEnd, action: str) -> None:
    page.page.locator(f"[data-action={action}]").click()


def said(page: FrontEnd, text: str | re.Pattern[str]) -> str:
    """Wait until the panel says this, and return all of it."""
    place = page.page.locator(".resolute-said", has_text=text)
    place.wait_for(timeout=300_000)
    return str(place.inner_text())


def files(server: ComfyServer) -> set[Path]:
    """What prompts may write."""
    return {path for name in ("output", "temp") for path in (server.folder / name).rglob("*") if path.is_file()}


def measurements(server: ComfyServer) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = server.client.get("/resolute/cache")["measurements"]
    return found


def test_a_workflow_is_measured_and_nothing_is_written(page: FrontEnd, server: ComfyServer, screenshots: Path) -> None:
    page.load_prompt(compiled(width=136, height=104))
    page.open_panel()
    assert page.page.locator(".resolute-measured").count() == len(measurements(server))
    before = files(server)
    page.page.evaluate(HEAR)
    press(page, "measure")
    text = said(page, re.compile(PICTURE))
    heard = page.page.evaluate("() => window.heard")
    assert "Measuring: the first prompts, with Resolute." in heard
    counted = [re.findall(r"^Measuring: prompt (\d+) of (\d+), with", each) for each in heard]
    numbers = [(int(number), int(count)) for ((number, count),) in filter(None, counted)]
    assert numbers == [(number, numbers[0][1]) for number in range(3, numbers[0][1] + 1)], "a count that stays"
    assert MEASURED.fullmatch(text), text
    assert files(server) == before
    (found,) = (each for each in measurements(server) if each["size"] == "136x104")
    assert 1 <= found["prompts"] <= 8, "one on a machine so busy that a pair takes ten seconds"
    assert (found["size"], found["text"], found["device"], found["steps"]) == ("136x104", text, "cpu", 2)
    kept = page.page.locator(".resolute-measured", has_text=text)
    assert kept.count() == 0, "not a second time while the panel says it"
    prompts = page.page.locator(".resolute-prompt")
    stocks = prompts.filter(has_text=re.compile(r"measured without Resolute, [\d.]+ m?s$"))
    assert stocks.count() >= 1
    assert prompts.first.filter(has_text="nothing ran through Resolute").count() == 0
    press(page, "copy")
    kept.wait_for()
    assert kept.inner_text() == f"{text}, measured on {found['date']}"
    assert page.texts()["Compile Model"] == text, "not that Resolute was off in the last prompt"
    assert f"measured on cpu, {found['date']}: SD15 {text}" in server.client.get("/resolute/report")["text"]
    page.queue()
    assert page.wait()["name"] == "execution_success"
    shown = page.texts()["Compile Model"].splitlines()[-1]
    assert re.fullmatch(rf"{FACTOR}, measured on \d{{4}}-\d\d-\d\d", shown), shown
    page.page.screenshot(path=screenshots / "measured.png")
    assert page.cut_texts() == []


def test_short_prompts_are_measured_in_turn_until_ten_seconds_or_eight_pairs(page: FrontEnd) -> None:
    module = f"await import('/extensions/{PACK_NAME}/measure.js')"
    script = f"async () => {{ const {{ pairsFor, schedule }} = {module}; %s }}"
    seconds = [0.01, 1.2, 3.8, 9.99, 10, 40]
    pairs = page.page.evaluate(script % f"return {seconds}.map(pairsFor)")
    assert pairs == [8, 8, 3, 2, 1, 1]
    runs = page.page.evaluate(script % "return [1, 3, 8].map(schedule)")
    letters = ["".join(run["arm"][1].upper() if run["counts"] else run["arm"][1] for run in each) for each in runs]
    assert letters[0] == "nNfF"
    assert letters[1] == "nNfFFnNNfF", "turned around in every second pair; the first after a change does not count"
    assert [letters[2].count(arm) for arm in "NF"] == [8, 8]
    assert len(letters[2]) == 25
    assert all(letters[2][index - 1].upper() == each for index, each in enumerate(letters[2]) if each.isupper())


def test_it_waits_for_code_that_is_compiled_behind_its_first_prompt(page: FrontEnd) -> None:
    script = f"""async () => {{
        const {{ Measure }} = await import('/extensions/{PACK_NAME}/measure.js');
        const runs = ['originals', 'regions'].map(kind => ({{ prompt_id: kind, segments: [{{ kind }}] }}));
        const live = {{ runs, coming: {{ left: 3 }} }}, said = [];
        const measure = new Measure(app, live, (text) => text);
        setTimeout(() => (live.coming = null), 1500);
        const begun = performance.now();
        const answers = [await measure.waited('regions'), await measure.waited('originals', (text) => said.push(text))];
        return [answers, said, performance.now() - begun > 1400];
    }}"""
    answers, said, has_waited = page.page.evaluate(script)
    assert (answers, has_waited) == ([False, True], True)
    assert set(said) == {"The blocks are still being compiled. The measurement goes on after that."}


@pytest.mark.long
def test_the_demos_model_is_measured_whole(page: FrontEnd, server: ComfyServer, screenshots: Path) -> None:
    """A trained model, whose pictures are no noise: two times, and a difference that nobody sees."""
    prompt = compiled(width=192, height=128)
    prompt["1"] = node("ResoluteDemoModel")
    prompt["2"] = node("CLIPTextEncode", clip=["1", 1], text="large red circle left, small blue square right")
    prompt["3"] = node("CLIPTextEncode", clip=["1", 1], text="")
    prompt["8"]["inputs"]["leave_out"] = ""
    prompt["9"] = node("ResoluteCompileVAEDecode", vae=["1", 2], backend="auto")
    prompt["6"]["inputs"]["vae"] = ["9", 0]
    page.load_prompt(prompt)
    page.open_panel()
    before = files(server)
    press(page, "measure")
    page.page.locator(".resolute-said", has_text=re.compile("^(?!Measuring|Short).")).wait_for(timeout=1_500_000)
    text = str(page.page.locator(".resolute-said").inner_text())
    assert MEASURED.fullmatch(text), text
    assert files(server) == before
    (found,) = (each for each in measurements(server) if each["size"] == "192x128")
    assert found["seconds"] > 0 and found["stock_seconds"] > 0 and found["mse"] < 1
    page.page.screenshot(path=screenshots / "measured-demo.png")


def test_a_measurement_is_cancelled_in_the_middle_and_leaves_no_figure(page: FrontEnd, server: ComfyServer) -> None:
    page.load_prompt(compiled(width=120, height=104))
    page.widgets({"KSampler.steps": 200})
    page.open_panel()
    known = measurements(server)
    press(page, "measure")
    said(page, "the first prompts")
    page.page.wait_for_function(
        "() => document.querySelector('[data-action=measure]').innerText === 'Cancel measuring'"
    )
    press(page, "measure")
    said(page, "The measurement was cancelled.")
    page.page.wait_for_function("async () => !(await (await app.api.fetchApi('/queue')).json()).queue_running.length")
    assert measurements(server) == known
    assert page.page.locator("[data-action=measure]").inner_text() == "Measure against stock"


def test_what_cannot_be_measured_is_said_and_queues_nothing(page: FrontEnd, server: ComfyServer) -> None:
    page.load_prompt(stock())
    page.open_panel()
    before = len(server.client.get("/history"))
    press(page, "measure")
    said(page, "This workflow has no compile node. Add Resolute to this workflow first.")
    assert len(server.client.get("/history")) == before


def test_a_file_that_is_missing_is_named_with_its_node(page: FrontEnd) -> None:
    page.load_prompt(compiled())
    page.widgets({"CheckpointLoaderSimple.ckpt_name": "none.safetensors"})
    page.open_panel()
    press(page, "measure")
    refusal = "Missing file: none.safetensors. Load Checkpoint needs it."
    assert said(page, "none.safetensors") == refusal, "ComfyUI's own says only that the prompt failed validation"


def test_a_workflow_that_fails_says_why_and_a_new_prompt_takes_the_red_sentence_away(
    page: FrontEnd, server: ComfyServer
) -> None:
    prompt = compiled(width=136, height=104)
    prompt["8"]["inputs"]["leave_out"] = "NoSuchBlock"
    page.load_prompt(prompt)
    page.open_panel()
    known = measurements(server)
    press(page, "measure")
    said(page, "NoSuchBlock")
    assert page.page.locator(".resolute-failed").count() == 1
    assert measurements(server) == known
    page.widgets({"ResoluteCompileModel.leave_out": "ResBlock, BasicTransformerBlock"})
    page.queue()
    assert page.wait()["name"] == "execution_success"
    assert page.page.locator(".resolute-failed").count() == 0


def test_the_switch_turns_a_workflow_off_and_stays_with_it(page: FrontEnd, server: ComfyServer) -> None:
    page.load_prompt(compiled(width=136, height=104))
    page.open_panel()
    press(page, "switch")
    switch = page.page.locator("[data-action=switch]")
    assert switch.get_attribute("aria-checked") == "false"
    badge = page.page.locator(".resolute-badge")
    badge.filter(has_text="off for this workflow").wait_for()
    calls = server.client.get("/resolute/cache")["counters"]
    page.queue()
    assert page.wait()["name"] == "execution_success"
    assert page.texts()["Compile Model"] == "Resolute is off: this runs as without it"
    now = server.client.get("/resolute/cache")["counters"]
    assert (now["graph_calls"], now["eager_calls"]) == (calls["graph_calls"], calls["eager_calls"])
    saved = page.page.evaluate("() => app.graph.serialize()")
    page.load(EMPTY, "empty")
    page.page.wait_for_function("() => document.querySelector('[data-action=switch]').ariaChecked === 'true'")
    page.load(saved, "switched")  # as after a reload, or from a file
    assert page.prompt()["8"]["inputs"]["resolute"] == "off"
    press(page, "switch")
    assert switch.get_attribute("aria-checked") == "true"
    badge.filter(has_text=re.compile("^Resolute: (on|ready)$")).wait_for()
    assert "resolute" not in page.prompt()["8"]["inputs"]


def test_off_a_warm_up_in_the_workflow_runs_nothing_and_fails_no_prompt(page: FrontEnd) -> None:
    prompt = compiled(width=136, height=104, seed=41)
    sizes = {"sizes": "96x96", "batch_sizes": "1", "prompt_chunks": "1", "cfg": 5.0}
    prompt["9"] = node("ResoluteWarmUp", model=["8", 0], **sizes)
    prompt["5"]["inputs"]["model"] = ["9", 0]
    page.load_prompt(prompt)
    page.open_panel()
    press(page, "switch")
    page.queue()
    assert page.wait()["name"] == "execution_success"
    texts = page.texts()
    assert texts["Warm Up"] == texts["Compile Model"] == "Resolute is off: this runs as without it"


def test_the_switch_survives_a_reload_of_the_page(page: FrontEnd) -> None:
    page.load_prompt(compiled(width=136, height=104))
    page.open_panel()
    press(page, "switch")
    # The page keeps the open workflow in the browser's storage, a moment after each change.
    page.page.wait_for_function(r"""() => Object.values({...localStorage}).some(text => /off\\*":true/.test(text))""")
    page.load_page()
    page.page.wait_for_function("() => app.graph.nodes.some(node => node.type === 'ResoluteCompileModel')")
    assert page.prompt()["8"]["inputs"]["resolute"] == "off"
    page.open_panel()
    assert page.page.locator("[data-action=switch]").get_attribute("aria-checked") == "false"
    press(page, "switch")
    assert "resolute" not in page.prompt()["8"]["inputs"]


def test_resolute_is_added_to_a_workflow_and_one_key_takes_it_back(page: FrontEnd, screenshots: Path) -> None:
    page.load_prompt(stock(width=136, height=104))
    before = page.page.evaluate(TITLES)
    page.open_panel()
    press(page, "add")
    said(page, "Added 1 × Compile Model, 1 × Compile VAE Decode.")
    page.fit_view()
    page.page.screenshot(path=screenshots / "added.png")
    assert page.overlaps() == []
    prompt = page.prompt()
    ours = {part["class_type"]: name for name, part in prompt.items() if part["class_type"].startswith("ResoluteC")}
    assert prompt["5"]["inputs"]["model"] == [ours["ResoluteCompileModel"], 0]
    assert prompt["6"]["inputs"]["vae"] == [ours["ResoluteCompileVAEDecode"], 0]
    page.page.locator("[data-action=add]").wait_for(state="hidden")
    assert "resolute-primary" in page.page.locator("[data-action=measure]").get_attribute("class")
    page.page.locator("canvas#graph-canvas").focus()
    page.page.keyboard.press("Control+z")
    page.page.wait_for_function(f"count => ({TITLES})().length === count", arg=len(before))
    assert page.page.evaluate(TITLES) == before
