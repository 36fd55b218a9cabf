"""README's quick start in a browser: what a user does and sees, from a template and in a workflow of their own."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from scripts.places import ROOT
from scripts.workflows import template, ui

from .front_end import FrontEnd
from .prompts import FACTOR, LEFT_OUT, PICTURE, stock

pytestmark = pytest.mark.browser


class Steps:
    """What the user did, and the seconds since the first step."""

    def __init__(self) -> None:
        self.begun, self.lines = time.perf_counter(), list[str]()

    def did(self, what: str) -> None:
        self.lines.append(f"{time.perf_counter() - self.begun:6.1f} s  {len(self.lines) + 1}. {what}")


@pytest.mark.parametrize("vue", [False, True], ids=["classic", "nodes2"])
def test_a_user_speeds_up_a_workflow_in_five_steps(page: FrontEnd, screenshots: Path, vue: bool) -> None:
    suffix = "-nodes2" if vue else ""
    page.load_prompt(stock(width=144, height=112))
    page.renderer(vue)
    page.fit_view()
    steps = Steps()
    page.add_by_search("speed up", "Compile Model")
    steps.did('double-clicked the canvas, typed "faster", pressed Enter')
    page.connect("Load Checkpoint", "MODEL", "Compile Model", "model")
    page.connect("Compile Model", "MODEL", "KSampler", "model")
    steps.did("put it between Load Checkpoint and KSampler")
    page.widgets({"ResoluteCompileModel.leave_out": LEFT_OUT})

    if not vue:  # there, everything is compiled by now
        cancel_while_it_compiles(page, screenshots / f"compiling{suffix}.png")
        steps.did("pressed Run, and then Cancel while it compiled")

    page.queue()
    assert page.wait()["name"] == "execution_success"
    result = r"Compiled, .*/step" if vue else r"compiled \d regions? in .* s/step"
    assert re.match(rf"144x112: {result}", page.texts()["Compile Model"])
    assert page.pictures() == {"Save Image": 1}
    steps.did("pressed Run again: the picture")

    page.widgets({"EmptyLatentImage.width": 128})
    page.queue()
    assert page.wait()["name"] == "execution_success"
    assert re.match(r"128x112: Compiled, .*/step", page.texts()["Compile Model"])
    steps.did("changed the width, pressed Run: Compiled")
    page.page.screenshot(path=screenshots / f"first-steps{suffix}.png")
    (screenshots / f"first-steps{suffix}.txt").write_text("\n".join(steps.lines) + "\n", "utf-8")
    assert page.overlaps() == []
    assert page.cut_texts() == []


def cancel_while_it_compiles(page: FrontEnd, screenshot: Path) -> None:
    page.queue()
    begun = r"/^compiling \d of \d+, [1-9]/"
    page.page.wait_for_function(f"() => window.resoluteTexts.some(text => {begun}.test(text))")
    page.page.locator(".resolute-badge", has_text=re.compile("compil")).wait_for()
    page.page.screenshot(path=screenshot)
    page.cancel()
    assert page.wait()["name"] == "execution_interrupted"
    texts = page.page.evaluate("() => window.resoluteTexts")
    begin = r"compiling 1 of \d+, \d+ s, (about \d+ s left|first time only)"
    assert any(re.fullmatch(begin, text) for text in texts), texts
    # At once where core's operations run, as in a trace; else the text says that the region at work ends first.
    ends = r"stops when this region is compiled|(.*: )?stopped.*"
    assert any(re.fullmatch(ends, text, re.DOTALL) for text in texts), texts
    totals = {total for text in texts for total in re.findall(r" of (\d+)", text)}
    assert len(totals) == 1, texts  # the total is right from the start


def has_said(page: FrontEnd, pattern: str) -> None:
    """Wait until a node was sent such a text since Run was pressed."""
    page.page.wait_for_function(f"() => window.resoluteTexts.some(text => /{pattern}/.test(text))")


@pytest.mark.long
@pytest.mark.parametrize("leave_out", [LEFT_OUT, ""], ids=["few", "no-setting-changed"])
def test_the_page_of_first_steps_is_true_step_by_step(page: FrontEnd, screenshots: Path, leave_out: str) -> None:
    """README's steps one by one, with a small model and a small picture on a CPU, where nothing is captured."""
    rows = re.findall(r"^(\d)\. (.+)$", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE)
    assert [number for number, _ in rows] == ["1", "2", "3", "4"]
    name, count = template("sdxl_text_to_image"), len(ui("sdxl_text_to_image")["nodes"])
    assert f"open *{name.partition(' - ')[0]}*" in rows[0][1]
    page.page.set_viewport_size({"width": 1456, "height": 819})
    steps = Steps()

    def done(number: int, what: str) -> None:
        steps.did(what)
        page.page.screenshot(path=screenshots / f"first-steps-{number}.png")

    page.browse_templates()
    page.page.locator("[role=dialog] input").first.fill("faster")
    page.choose_template(name, count)
    assert count == 11  # "eleven nodes"
    done(1, 'opened the templates, typed "faster", chose SDXL text to image')

    assert page.unknown_types() == page.complaints() == []
    small = {"preset": "custom", "width": 168, "height": 104}
    page.widgets({f"ResoluteResolution.{name}": value for name, value in small.items()})
    page.widgets({"KSampler.steps": 2, "ResoluteCompileModel.leave_out": leave_out})
    page.widgets({"ResoluteCompileVAEDecode.backend": "eager"} if leave_out else {})
    done(2, "chose the checkpoint, a small size and two steps")

    page.queue()
    if not leave_out:  # the three regions that are left otherwise are compiled by an earlier test
        has_said(page, r"^compiling \d+ of \d+, [1-9]")
        page.page.screenshot(path=screenshots / "first-steps-3-compiling.png")
    assert page.wait(seconds=1500.0)["name"] == "execution_success"
    result = "(Compiled|compiled 3 regions in .*)" if leave_out else r"compiled \d+ regions in [\d.]+ s"
    assert re.match(rf"168x104: {result}, .*/step", page.texts()["Compile Model"])
    assert page.pictures() == {"Save Image": 1}
    done(3, "pressed Run: it compiled, then the picture")

    page.widgets({"ResoluteResolution.width": 152})
    page.queue()
    assert page.wait()["name"] == "execution_success"
    assert re.match(r"152x104: Compiled, .*/step", page.texts()["Compile Model"])
    done(4, "changed the size, pressed Run: Compiled")

    page.widgets({"KSampler.seed": 7})
    page.queue()
    assert page.wait()["name"] == "execution_success"
    assert re.match(r"152x104: Compiled, .*/step", page.texts()["Compile Model"])
    page.page.locator(".resolute-badge", has_text="Resolute: ready").wait_for()
    done(5, "pressed Run once more: Compiled")

    page.open_panel()
    page.page.locator("[data-action=measure]").click()
    measured = re.compile(rf"152x104: {FACTOR}, {PICTURE}")
    page.page.locator(".resolute-said", has_text=measured).wait_for(timeout=300_000)
    assert measured.fullmatch(page.texts()["Compile Model"])
    done(6, "measured against stock")
    (screenshots / "first-steps-page.txt").write_text("\n".join(steps.lines) + "\n", "utf-8")
    assert page.cut_texts() == []
