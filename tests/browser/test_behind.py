"""Compiles behind the picture, as a user sees them: when they are ready, what ran meanwhile, and the setting."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from compile_cache.config import COMPILE, CacheConfig
from scripts.server.process import ComfyServer, link
from scripts.workflows import SD15

from ..archive import unpack
from ..conftest import PACK_NAME, linked_packs
from . import front_end
from .conftest import ENVIRONMENT, MINI
from .front_end import DIALOG, FrontEnd
from .prompts import LEFT_OUT, compiled

pytestmark = pytest.mark.browser

WAITS = "sampling at ComfyUI's speed; "
READY_IN = re.compile(WAITS + r"(compiled blocks in about \d+ (s|min)|estimating when compiled blocks are there)")
COUNTED = re.compile(r"^\d+ of \d+ regions compiled(, ready in about \d+ (s|min))?$")
READY = re.compile(r"^Resolute: ready$")
FASTER = re.compile(r"^144x112: Now compiled, [\d.]+ m?s/step$")
TOAST = ".p-toast-message"
# Compiles nothing while a file "broken" is beside it.
COMPILER = """#!/bin/sh
case "$*" in *" -o "*) [ ! -e "$0.broken" ] || { echo "error: no space left" >&2; exit 1; };; esac
exec g++ "$@"
"""
VARIABLE = "RESOLUTE_COMPILE"
MOST_SECONDS = 400  # until all regions of the small model are there, on a slow machine


@pytest.fixture(scope="module")
def behind(
    make_server: Callable[..., ComfyServer],
    make_model: Callable[[str], str],
    tmp_path_factory: pytest.TempPathFactory,
) -> ComfyServer:
    """A server that has compiled nothing yet."""
    from scripts.models.generated import folder

    mini = make_model(MINI)
    compiler = tmp_path_factory.mktemp("compiler") / "g++"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    own = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path_factory.mktemp("inductor")), "CXX": str(compiler)}
    installed = unpack(tmp_path_factory.mktemp("archive") / PACK_NAME)
    server = make_server(
        environment={**ENVIRONMENT, **own, "RESOLUTE_WORKERS": "2", VARIABLE: "behind"},
        packs={**linked_packs(), PACK_NAME: installed},
    )
    settings(server).parent.mkdir(parents=True, exist_ok=True)
    settings(server).write_text(json.dumps(front_end.USUAL), "utf-8")
    link(folder() / "checkpoints" / mini, server.folder / "models" / "checkpoints" / SD15)
    return server


@pytest.fixture
def page(behind: ComfyServer, browser: FrontEnd) -> Iterator[FrontEnd]:
    """A second tab: one browser serves all tests."""
    tab = FrontEnd(browser.page.context.new_page(), behind.url)
    tab.start()
    yield tab
    tab.page.close()


def settings(server: ComfyServer) -> Path:
    return server.folder / "user" / "default" / "comfy.settings.json"


def prompt(seed: int, steps: int, leave_out: str = "") -> dict[str, Any]:
    made = compiled(seed=seed)
    made["8"]["inputs"]["leave_out"] = leave_out
    made["5"]["inputs"]["steps"] = steps
    return made


def run(page: FrontEnd, **given: Any) -> None:
    page.load_prompt(prompt(**given))
    page.queue()
    assert page.wait()["name"] == "execution_success"


def kinds(server: ComfyServer) -> list[str]:
    """Of the pieces of the latest sampling run, without short waits."""
    segments = server.client.get("/resolute/runs")["runs"][-1]["segments"]
    return [piece["kind"] for piece in segments]


def open_setting(page: FrontEnd) -> Any:
    """The entry of the setting in ComfyUI's dialog."""
    page.page.evaluate(front_end.js.COMMAND, "Comfy.ShowSettingsDialog")
    page.page.locator(DIALOG).get_by_text("Resolute", exact=True).first.click()
    return page.page.locator(DIALOG).locator(".setting-item", has_text="Compile behind or before the picture")


def test_what_cannot_be_compiled_is_red_with_the_reason_and_is_tried_again(
    page: FrontEnd, behind: ComfyServer, screenshots: Path
) -> None:
    tab, broken = page.page, Path(f"{behind.environment['CXX']}.broken")
    badge = tab.locator(".resolute-badge")
    page.open_panel()
    page.load_prompt(compiled(seed=1))  # three regions
    broken.touch()
    page.queue()
    assert page.wait()["name"] == "execution_success"
    why = re.compile(r"^3 regions could not be compiled: .+")
    badge.filter(has_text=why).wait_for(timeout=1000 * MOST_SECONDS)
    assert badge.get_attribute("data-look") == "failed"
    assert why.match(tab.locator(".resolute-headline").inner_text())
    assert why.match(page.texts()["Compile Model"]), "no longer that it compiles meanwhile"
    assert "3 regions could not be compiled" in behind.client.get("/resolute/report")["text"]
    tab.screenshot(path=screenshots / "behind-failed.png")
    assert page.cut_texts() == []
    broken.unlink()
    tab.locator("[data-action=try-again]").click()
    tab.locator(".resolute-said", has_text="Press Run: what failed is compiled again.").wait_for()
    badge.filter(has_text=re.compile("^Resolute: on$")).wait_for()
    run(page, seed=2, steps=2, leave_out=LEFT_OUT)
    said = "() => window.resoluteTexts.at(-1) === 'Compiled. The next run uses it.'"
    tab.wait_for_function(said, timeout=1000 * MOST_SECONDS)
    run(page, seed=3, steps=2, leave_out=LEFT_OUT)
    assert behind.client.get("/resolute/cache")["failed"]["regions"] == 0
    assert FASTER.match(page.texts()["Compile Model"].splitlines()[0])
    tab.locator(TOAST, has_text="Now compiled").wait_for()


def test_a_first_prompt_says_when_it_gets_faster_and_a_later_one_that_it_is(
    page: FrontEnd, behind: ComfyServer, screenshots: Path
) -> None:
    tab = page.page
    page.open_panel()
    page.load_prompt(prompt(seed=1, steps=400))
    page.queue()
    tab.wait_for_function("() => window.resoluteTexts.some(text => text.startsWith('sampling at'))", timeout=300_000)
    page.fit_view()
    badge = tab.locator(".resolute-badge")
    badge.filter(has_text=COUNTED).wait_for()
    assert READY_IN.fullmatch(page.texts()["Compile Model"])
    assert badge.get_attribute("data-look") == "coming", "nothing waits for it"
    assert tab.locator(".resolute-progress").is_hidden()
    tab.screenshot(path=screenshots / "behind-first.png")
    assert page.cut_texts() == []
    assert COUNTED.match(behind.client.get("/resolute/cache")["coming"]["text"])
    page.load_page()  # in the middle
    badge.filter(has_text=COUNTED).wait_for()
    page.open_panel()
    page.load_prompt(prompt(seed=1, steps=400))
    page.watch()
    behind.client.interrupt()  # a page that was loaded anew has no button for a prompt of before
    assert page.wait()["name"] == "execution_interrupted"
    run(page, seed=2, steps=2)
    assert page.texts()["Compile Model"].startswith("144x112: compiling meanwhile, ")
    assert kinds(behind) == ["originals"]
    badge.filter(has_text=COUNTED).wait_for()
    tab.screenshot(path=screenshots / "behind-meanwhile.png")
    badge.filter(has_text=READY).wait_for(timeout=1000 * MOST_SECONDS)
    ends = time.monotonic() + MOST_SECONDS
    seed = 3
    while True:
        run(page, seed=seed, steps=2)
        if FASTER.match(page.texts()["Compile Model"].splitlines()[0]):
            break
        assert time.monotonic() < ends, page.texts()
        seed += 1
        badge.filter(has_text=READY).wait_for(timeout=1000 * MOST_SECONDS)
    assert kinds(behind)[-1] == "regions"
    tab.locator(".resolute-legend", has_text="ComfyUI's own blocks, compiling").wait_for()
    assert tab.locator(".resolute-bar .resolute-originals").count() > 0
    page.fit_view()
    tab.screenshot(path=screenshots / "behind-faster.png")
    assert page.cut_texts() == []
    run(page, seed=90, steps=2)
    assert page.texts()["Compile Model"].startswith("144x112: Compiled, ")
    assert "originals" not in kinds(behind)


def test_the_variable_wins_over_the_setting_which_counts_after_a_restart(
    page: FrontEnd, behind: ComfyServer, screenshots: Path
) -> None:
    entry = open_setting(page)
    entry.get_by_text(f"{VARIABLE}=behind").wait_for()
    page.page.screenshot(path=screenshots / "behind-variable.png")
    assert entry.get_by_role("combobox").count() == 0
    behind.stop()
    behind.environment |= {VARIABLE: None, "RESOLUTE_STORE": "0"}
    behind.start()
    usual = CacheConfig().compile
    other = next(each for each in COMPILE if each != usual)
    page.url = behind.url
    page.load_page()
    entry = open_setting(page)
    entry.get_by_role("combobox").click()
    page.page.screenshot(path=screenshots / "behind-setting.png")
    page.page.get_by_role("option", name=other).click()
    page.page.wait_for_function(
        "async value => (await (await app.api.fetchApi('/settings/Resolute.Compile')).json()) === value", arg=other
    )
    behind.stop()
    behind.start()
    small = compiled(width=136, height=104)
    behind.client.run(small)
    counters = behind.client.get("/resolute/cache")["counters"]
    assert (counters["waiting_calls"] > 0) == (other == "behind"), counters
    assert counters["waiting_calls"] + counters["graph_calls"] >= 2
