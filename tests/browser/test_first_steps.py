"""docs/first-steps.md in a browser: what a user does and sees until the second size, with no setting changed."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from scripts.browser.front_end import FrontEnd

from .prompts import LEFT_OUT, stock

pytestmark = pytest.mark.browser


class Steps:
    """What the user did, and the seconds since the first step."""

    def __init__(self) -> None:
        self.begun, self.lines = time.perf_counter(), list[str]()

    def did(self, what: str) -> None:
        self.lines.append(f"{time.perf_counter() - self.begun:6.1f} s  {len(self.lines) + 1}. {what}")


@pytest.mark.parametrize(
    ("vue", "leave_out"),
    [
        pytest.param(False, LEFT_OUT, id="classic"),
        pytest.param(True, LEFT_OUT, id="nodes2"),
        pytest.param(False, "", id="no-setting-changed", marks=pytest.mark.long),
    ],
)
def test_a_user_speeds_up_a_workflow_in_five_steps(
    page: FrontEnd, screenshots: Path, vue: bool, leave_out: str
) -> None:
    suffix = "-nodes2" if vue else "" if leave_out else "-all"
    page.load_prompt(stock(width=144, height=112))
    page.renderer(vue)
    page.fit_view()
    steps = Steps()
    page.add_by_search("faster", "Compile Model")
    steps.did('double-clicked the canvas, typed "faster", pressed Enter')
    page.connect("Load Checkpoint", "MODEL", "Compile Model", "model")
    page.connect("Compile Model", "MODEL", "KSampler", "model")
    steps.did("put it between Load Checkpoint and KSampler")
    page.widgets({"ResoluteCompileModel.leave_out": leave_out})

    if not vue:  # there, everything is compiled by now
        cancel_while_it_compiles(page, screenshots / f"compiling{suffix}.png")
        steps.did("pressed Run, and then Cancel while it compiled")

    page.queue()
    assert page.wait()["name"] == "execution_success"
    result = r"nothing compiled, .*/step" if vue else r"compiled \d regions? in .* s/step"
    assert re.match(rf"144x112: {result}", page.texts()["Compile Model"])
    assert page.pictures() == {"Save Image": 1}
    steps.did("pressed Run again: the picture")

    page.widgets({"EmptyLatentImage.width": 128})
    page.queue()
    assert page.wait()["name"] == "execution_success"
    assert re.match(r"128x112: nothing compiled, .*/step", page.texts()["Compile Model"])
    steps.did("changed the width, pressed Run: nothing compiled")
    page.page.screenshot(path=screenshots / f"first-steps{suffix}.png")
    (screenshots / f"first-steps{suffix}.txt").write_text("\n".join(steps.lines) + "\n", "utf-8")
    assert page.overlaps() == []
    assert page.cut_texts() == []


def cancel_while_it_compiles(page: FrontEnd, screenshot: Path) -> None:
    page.queue()
    begun = r"/^(starting the compiler, then \d+ regions|compiling \d of \d+), [1-9]/"
    page.page.wait_for_function(f"() => window.resoluteTexts.some(text => {begun}.test(text))")
    page.page.locator(".resolute-badge", has_text=re.compile("compil")).wait_for()
    page.page.screenshot(path=screenshot)
    page.cancel()
    assert page.wait()["name"] == "execution_interrupted"
    texts = page.progress_texts()
    begin = r"(starting the compiler, then \d+ regions|compiling 1 of \d+), \d+ s(, about \d+ s left)?"
    assert any(re.fullmatch(begin, text) for text in texts), texts
    # At once where core's operations run, as in a trace; else the text says that the region at work ends first.
    assert any(
        re.fullmatch(r"stopp(ing|ed); \d of \d+ are kept|.*: stopped in the first step.*", text, re.DOTALL)
        for text in texts
    ), texts
    totals = {total for text in texts for total in re.findall(r"(?: of|, then) (\d+)", text)}
    assert len(totals) == 1, texts  # the total is right from the start
