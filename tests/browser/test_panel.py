"""The badge, the panel and errors, as a user sees them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from scripts.server.process import ComfyServer
from scripts.workflows import SD15

from ..comfy.rig import node
from .front_end import EMPTY, FrontEnd
from .prompts import compiled, stock

pytestmark = pytest.mark.browser
# A size has a row in the table of a model.
ROW = "size => [...document.querySelectorAll('.resolute-model td')].some(cell => cell.textContent === size)"


def test_the_panel_follows_a_warm_up_and_a_free(page: FrontEnd, screenshots: Path) -> None:
    page.load_prompt(compiled(width=128, height=96))
    page.open_panel()
    tab = page.page
    tab.locator(".resolute-badge", has_text=re.compile(r"^Resolute: (on|ready)$")).wait_for()
    page.watch()
    tab.locator("[data-action=warm-up]").click()
    assert page.wait()["name"] == "execution_success"
    # The batch is the user's: the positive and the negative prompt share a call of two.
    tab.wait_for_function(ROW, arg="128x96")
    tab.locator(".resolute-prompt").first.wait_for()
    tab.locator(".resolute-said", has_text=re.compile(r"^Ready: 128x96, [\d.]+ m?s$")).wait_for()
    tab.screenshot(path=screenshots / "panel-dark.png")
    tab.locator("[data-action=free]").click()
    tab.locator(".resolute-said", has_text="No captures to free.").wait_for()
    tab.locator("[data-action=copy]").click()
    tab.locator(".resolute-said", has_text="clipboard").wait_for()
    assert "region compiles" in tab.evaluate("() => navigator.clipboard.readText()")
    assert page.cut_texts() == []


def test_before_a_size_is_ready_nothing_says_so(page: FrontEnd, server: ComfyServer) -> None:
    tab = page.page
    page.load_prompt(compiled())
    cache = {**server.client.get("/resolute/cache"), "sizes_ready": 0}
    tab.route("**/resolute/cache", lambda route: route.fulfill(json=cache))
    try:
        page.open_panel()
        tab.locator(".resolute-badge", has_text=re.compile("^Resolute: on$")).wait_for()
        assert tab.locator(".resolute-headline").inner_text() == "no size is ready yet"
    finally:
        tab.unroute("**/resolute/cache")


def test_each_figure_of_the_panel_is_the_servers(page: FrontEnd, server: ComfyServer) -> None:
    tab = page.page
    for width in (128, 152):
        page.load_prompt(compiled(width=width, height=96))
        page.queue()
        assert page.wait()["name"] == "execution_success"
    page.open_panel()
    tab.wait_for_function(ROW, arg="152x96")
    cache = server.client.get("/resolute/cache")
    models = [model for model in cache["models"] if model["shapes"]]
    sampled = {
        (model["model"], shape["size"])
        for model in models
        for shape in model["shapes"]
        if shape["role"] == "unet" and shape["state"] in ("captured", "memory")
    }
    assert cache["regions_ready"] > 0
    assert tab.locator(".resolute-headline").inner_text() == f"{len(sampled)} sizes ready"
    store, details = cache["store"], tab.locator(".resolute-panel > details")
    assert tab.locator(".resolute-model summary").first.inner_text().endswith(" ready"), "a count, folded"
    counted = f"{cache['regions_ready']} compiled regions in memory. On disk: {store['regions']} regions, "
    assert details.inner_text() == "Details", "closed"
    assert details.locator("div").text_content().startswith(counted)
    states = {"captured": "ready", "memory": "ready", "disk": "on disk", "unknown": "to compile"}
    shown = tab.evaluate(
        """() => [...document.querySelectorAll('.resolute-model')].map(model => [model.querySelector('h4').innerText,
            [...model.querySelectorAll('tbody tr')].map(row => [...row.cells].map(cell => cell.textContent))])"""
    )
    assert len(shown) == len(models)
    rows = {tuple(row) for _, table in shown for row in table}
    assert rows == {(shape["size"], states[shape["state"]]) for model in models for shape in model["shapes"]}
    # What ran has the name of its file, what is remembered from before that of its model.
    files = {run["structure"]: run["file"] for run in server.client.get("/resolute/runs")["runs"]}
    titles = [name.removesuffix(" (decoding)") for name, _ in shown]
    assert sorted(titles) == sorted(files.get(model["model"], model["name"]) for model in models)
    assert SD15 in titles
    # The node, the panel and the route give the run of the same size the same seconds.
    run = server.client.get("/resolute/runs")["runs"][-1]
    assert run["size"] == "152x96"
    text = tab.locator(".resolute-prompt").first.inner_text()
    assert text.splitlines()[0].endswith(" 152x96")
    assert run["status"].splitlines()[0].removeprefix("152x96: ") in text
    assert page.texts()["Compile Model"].splitlines()[0] == run["status"].splitlines()[0]


def test_a_workflow_without_a_node_of_ours_says_so_and_add_is_beside_it(page: FrontEnd, screenshots: Path) -> None:
    tab = page.page
    badge, add = tab.locator(".resolute-badge"), tab.locator(".resolute-add")
    page.load_prompt(stock(seed=73))
    badge.filter(has_text=re.compile("^Resolute: not in this workflow$")).wait_for()
    assert badge.get_attribute("data-look") == "off"
    tab.screenshot(path=screenshots / "badge-add.png")
    add.click()
    badge.filter(has_text=re.compile("^Resolute: (on|ready)$")).wait_for()
    assert "Compile Model" in page.titles()
    assert set(page.texts().values()) == {"Press Run"}
    add.wait_for(state="hidden")
    page.load(EMPTY, "empty")
    badge.filter(has_text="not in this workflow").wait_for()
    assert add.is_hidden(), "there is nothing to compile"


DISPATCH = "name => app.api.dispatchEvent(new CustomEvent(name))"


def test_the_badge_says_that_the_server_is_gone_until_it_is_back(page: FrontEnd) -> None:
    badge = page.page.locator(".resolute-badge")
    page.load_prompt(compiled())
    page.page.evaluate(DISPATCH, "reconnecting")
    badge.filter(has_text=re.compile("^ComfyUI does not answer$")).wait_for()
    assert badge.get_attribute("data-look") == "failed"
    page.page.evaluate(DISPATCH, "reconnected")
    badge.filter(has_text=re.compile("^Resolute: (on|ready)$")).wait_for()


TITLED = "([models, runs]) => import('/extensions/resolute/sizes.js').then(it => it.titled(models, runs))"


def test_models_have_the_names_of_their_files_each_before_its_decoder(page: FrontEnd) -> None:
    def model(name: str, number: str, role: str) -> dict[str, Any]:
        return {"name": name, "model": number, "shapes": [{"role": role}]}

    models = [model("AutoencoderKL", "a", "vae_decode"), model("SDXL", "x", "unet"), model("SD15", "s", "unet")]
    models += [model("AutoencoderKL", "b", "vae_decode"), {"name": "none", "model": "n", "shapes": []}]
    names = {"a": "one.safetensors", "s": "one.safetensors", "x": "two.safetensors", "b": "two.safetensors"}
    runs = [{"structure": number, "file": file} for number, file in names.items()]
    found = page.page.evaluate(TITLED, [models, runs])
    assert [(each["title"], each["name"]) for each in found] == [
        ("one.safetensors", "SD15"), ("one.safetensors", "AutoencoderKL"),
        ("two.safetensors", "SDXL"), ("two.safetensors", "AutoencoderKL"),
    ]  # fmt: skip
    found = page.page.evaluate(TITLED, [models, []])  # after a restart
    assert [each["title"] for each in found] == ["SD15", "SDXL", "AutoencoderKL", "AutoencoderKL"]


def test_a_prompt_without_resolute_is_among_the_latest(page: FrontEnd, screenshots: Path) -> None:
    page.page.set_viewport_size({"width": 1456, "height": 819})
    page.load_prompt(stock(seed=71))
    page.open_panel()
    page.queue()
    assert page.wait()["name"] == "execution_success"
    first = page.page.locator(".resolute-prompt").first
    first.filter(has_text=re.compile(r"nothing ran through Resolute, [\d.]+ m?s$")).wait_for()
    page.load_prompt(compiled(seed=72))
    page.queue()
    assert page.wait()["name"] == "execution_success"
    first.filter(has_text="sampling").wait_for()
    page.page.screenshot(path=screenshots / "panel-prompts.png")
    assert page.page.locator(".resolute-prompt", has_text="nothing ran through Resolute").count() >= 1


ANNOUNCED = """() => {
    const place = document.querySelector('.resolute-announcer');
    window.announced = [];
    new MutationObserver(() => window.announced.push(place.textContent)).observe(place, {childList: true});
}"""
SEND = "detail => app.api.dispatchEvent(new CustomEvent('resolute', {detail}))"


def test_a_screen_reader_hears_the_begin_the_stop_and_the_end(page: FrontEnd) -> None:
    """And none of the seconds between. The messages are those that the server sends."""
    tab = page.page
    tab.evaluate(ANNOUNCED)
    assert tab.locator(".resolute-announcer[role=status][aria-live=polite]").count() == 1
    assert tab.locator(".resolute-text[aria-live], .resolute-headline[aria-live]").count() == 0
    for seconds in range(3):
        tab.evaluate(SEND, {"kind": "working", "text": f"compiling 1 of 2, {seconds} s", "done": 0, "total": 2})
    tab.evaluate(SEND, {"kind": "idle"})  # between two nodes
    tab.evaluate(SEND, {"kind": "working", "text": "compiling 2 of 2, 3 s", "done": 1, "total": 2})
    for _ in range(2):
        text = "stops when this region is compiled"
        tab.evaluate(SEND, {"kind": "working", "text": text, "done": 1, "total": 2, "stopping": True})
    run = {"size": "64x64", "lines": ["stopped"], "words": {"lines": ["stopped"]}, "marks": []}
    tab.evaluate(SEND, {"kind": "run", "run": run})
    tab.wait_for_function("() => window.announced.length >= 3")
    assert tab.evaluate("() => window.announced") == [
        "compiling 1 of 2, 0 s",
        "stops when this region is compiled",
        "64x64: stopped",
    ]


def test_warm_ups_and_cancelled_prompts_are_marked(page: FrontEnd) -> None:
    page.load_prompt(compiled(width=176, height=96))
    page.open_panel()
    marks = page.page.locator(".resolute-prompt").first.locator(".resolute-mark")
    page.watch()
    page.page.locator("[data-action=warm-up]").click()
    assert page.wait()["name"] == "execution_success"
    marks.filter(has_text="warm-up").wait_for()
    page.widgets({"KSampler.steps": 400})
    page.queue()
    page.page.wait_for_function("() => document.title.includes('%')")  # it samples
    page.cancel()
    assert page.wait()["name"] == "execution_interrupted"
    marks.filter(has_text="cancelled").wait_for()


def test_the_memory_of_the_gpu_is_live(page: FrontEnd) -> None:
    """The server has no GPU, so its answers are changed on their way."""
    tab, gib = page.page, 1 << 30
    free = [20 * gib]

    def with_gpu(route: Any) -> None:
        response = route.fetch()
        about = response.json()
        about |= {"bytes": 100 << 20, "entries": [{"bytes": 4 << 20}]}
        about["device"] |= {"name": "Some GPU", "captures": True, "total_bytes": 24 * gib, "free_bytes": free[0]}
        route.fulfill(response=response, json=about)

    def stats(route: Any) -> None:
        route.fulfill(json={"devices": [{"vram_total": 24 * gib, "vram_free": free[0]}]})

    tab.route("**/resolute/cache", with_gpu)
    tab.route("**/system_stats", stats)
    try:
        page.open_panel()
        tab.locator(".resolute-memory", has_text="4096 MiB of 24576 MiB used on Some GPU").wait_for()
        tab.locator(".resolute-memory", has_text="; 96 MiB shared by all sizes").wait_for()
        free[0] = 10 * gib  # no message tells of it
        tab.locator(".resolute-memory", has_text="14336 MiB of 24576 MiB used on Some GPU").wait_for()
    finally:
        tab.unroute("**/resolute/cache")
        tab.unroute("**/system_stats")


def test_the_panel_is_reached_and_named_without_a_mouse(page: FrontEnd) -> None:
    tab = page.page
    tab.locator(".resolute-badge").focus()
    tab.keyboard.press("Enter")
    tab.wait_for_selector(".resolute-panel")
    assert tab.get_by_role("region", name="Resolute").count() == 1
    tab.locator("[data-action=warm-up]").focus()
    tab.keyboard.press("Tab")
    assert tab.evaluate("() => document.activeElement.dataset.action") == "free"
    assert "Resolute" in tab.locator(".resolute-badge").get_attribute("aria-label")


def test_the_panel_works_in_light_colours_and_a_narrow_window(page: FrontEnd, screenshots: Path) -> None:
    page.settings({"Comfy.ColorPalette": "light"})
    page.page.wait_for_function("() => !document.documentElement.classList.contains('dark-theme')")
    page.place(["ResoluteCompileModel", "ResoluteReport", "ResoluteResolution"])
    page.open_panel()
    page.page.screenshot(path=screenshots / "panel-light.png")
    assert page.contrast(".resolute-panel h2") > 4.5
    assert page.contrast(".resolute-button") > 4.5
    assert page.contrast(".resolute-text") > 4.5
    page.page.set_viewport_size({"width": 700, "height": 800})
    page.stable()
    page.page.screenshot(path=screenshots / "panel-narrow.png")
    assert page.cut_texts() == []
    box = page.page.locator(".resolute-panel").bounding_box()
    assert box is not None
    assert box["x"] + box["width"] <= 700


@pytest.mark.parametrize("vue", [False, True], ids=["classic", "nodes2"])
def test_a_wrong_size_is_said_on_the_node_and_in_a_message(page: FrontEnd, screenshots: Path, vue: bool) -> None:
    size = node("ResoluteResolution", preset="custom", width=1000, height=700, multiple="64", use="exact")
    picture = node("EmptyImage", width=["1", 0], height=["1", 1], batch_size=1, color=0)
    page.load_prompt({"1": size, "2": picture, "3": node("PreviewImage", images=["2", 0])})
    page.renderer(vue)
    page.queue()
    end = page.wait()
    # The front end rounds 700 to the step of the widget.
    sentence = "Size 1000x704: width and height must be multiples of 64 between 64 and 8192. The nearest valid size is "
    assert end["detail"]["exception_message"].startswith(sentence)
    assert any(text.startswith(sentence) for text in page.texts().values())
    message = f"() => document.querySelector('[data-testid=error-overlay]')?.innerText.includes({sentence!r})"
    page.page.wait_for_function(message)
    page.page.screenshot(path=screenshots / f"wrong-size{'-nodes2' if vue else ''}.png")
    assert page.cut_texts() == []
    page.widgets({"ResoluteResolution.use": "nearest valid"})
    page.queue()
    assert page.wait()["name"] == "execution_success"
    assert "1024x704 instead of 1000x704: multiples of 64" in page.texts().values()
    page.page.screenshot(path=screenshots / f"nearest-size{'-nodes2' if vue else ''}.png")


def test_an_error_repeats_little_of_a_long_input(page: FrontEnd) -> None:
    page.load_prompt({"1": node("ResoluteWarmUp", sizes="x" * 5_000, batch_sizes="1", prompt_chunks="1", cfg=7.0)})
    page.queue()
    detail = page.wait()["detail"]
    assert detail["exception_type"] == "resolute.UserError"
    assert len(detail["exception_message"]) < 300
