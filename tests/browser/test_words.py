"""Chinese and Japanese: nodes, results, templates, the panel. The last file: each language loads the page anew."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from scripts.places import ROOT
from scripts.workflows import template, ui

from ..comfy.rig import node
from . import front_end_scripts
from .front_end import DIALOG, FrontEnd
from .prompts import compiled

pytestmark = pytest.mark.browser
TITLES = {"zh": "编译模型", "zh-TW": "編譯模型", "ja": "モデルをコンパイル"}
LANGUAGES = ["zh", pytest.param("zh-TW", marks=pytest.mark.long), pytest.param("ja", marks=pytest.mark.long)]
ENGLISH = re.compile(r"[a-z]{3,} [a-z]{3,}")  # two words in a row
NOTE = "() => app.graph.nodes.find(node => node.type === 'MarkdownNote').widgets[0].value"
GROUPS = "() => app.graph.groups.map(group => group.title)"
END = ", faster - Resolute compiled speed-up"  # of each template's title
SEARCHED = {"zh": ("加速", "更快"), "zh-TW": ("加速", "更快"), "ja": ("高速化", "速い")}
# The thumbnail of a template, which has 640 pixels each way.
PICTURE = "title => document.querySelector(`[data-testid='template-workflow-${title}'] img`)?.naturalHeight === 640"


def table(language: str) -> dict[str, str]:
    source = (ROOT / "web" / "languages" / f"{language}.js").read_text("utf-8")
    loaded: dict[str, str] = json.loads(source.partition("export default ")[2].rstrip().removesuffix(";"))
    return loaded


def pattern(template: str) -> str:
    """A pattern for a filled template."""
    return re.sub(r"\\{\w+\\}", ".+", re.escape(template))


@pytest.mark.parametrize("language", LANGUAGES)
def test_what_people_read_is_in_the_language_of_the_settings(
    browser: FrontEnd, screenshots: Path, language: str
) -> None:
    words = table(language)
    browser.load_page(language)
    browser.place(["ResoluteCompileModel", "ResoluteReport"])
    browser.open_panel()
    browser.page.screenshot(path=screenshots / f"language-{language}.png")
    assert TITLES[language] in browser.titles()
    assert "Warm up" not in browser.page.locator(".resolute-panel").inner_text()
    assert browser.cut_texts() == []

    # The result of a run, on the node and in the panel.
    prompt = compiled(seed=sum(map(ord, language)), width=160, height=96)  # else ComfyUI has its result
    prompt["9"] = {"class_type": "ResoluteReport", "inputs": {"any": ["6", 0]}}
    browser.load_prompt(prompt)
    browser.queue()
    assert browser.wait()["name"] == "execution_success"
    texts = browser.texts()
    result = f"({pattern(words['Compiled'])}|{pattern(words['compiled {count} regions in {time}'])})"
    assert re.match(rf"160x96：{result}", texts[TITLES[language]]), texts
    assert not any(ENGLISH.search(line) for line in texts[TITLES[language]].splitlines()), texts
    report = next(text for title, text in texts.items() if title != TITLES[language])
    assert re.search(pattern(words["{count} replays"]), report), report
    row = browser.page.locator(".resolute-prompt").first
    row.wait_for()
    assert re.search(result, row.inner_text())
    assert not ENGLISH.search(row.locator(".resolute-status").first.inner_text())
    browser.page.screenshot(path=screenshots / f"language-{language}-run.png")
    assert browser.cut_texts() == []

    # An error, and below it in English, for who searches for it.
    exact = {"preset": "custom", "width": 1000, "height": 704, "multiple": "64", "use": "exact"}
    picture = node("EmptyImage", width=["1", 0], height=["1", 1], batch_size=1, color=0)
    made = {"1": node("ResoluteResolution", **exact), "2": picture, "3": node("PreviewImage", images=["2", 0])}
    browser.load_prompt(made)
    browser.queue()
    assert browser.wait()["name"] == "execution_error"
    (said,) = browser.texts().values()
    translated, english = said.splitlines()
    english_key = "Size {1}: width and height must be multiples of {2} between {3} and {4}. {5}."
    assert re.fullmatch(pattern(words[english_key]), translated)
    assert not ENGLISH.search(translated), "the values too"
    assert re.fullmatch(pattern(english_key), english)
    browser.page.screenshot(path=screenshots / f"language-{language}-error.png")

    # A setting that a variable of the environment decides shows that, in place of a control that says otherwise.
    browser.page.evaluate(front_end_scripts.COMMAND, "Comfy.ShowSettingsDialog")
    browser.page.locator(DIALOG).get_by_text("Resolute", exact=True).first.click()
    setting = browser.page.locator("[id='Resolute.Compile']")
    setting.get_by_text("RESOLUTE_COMPILE=before", exact=True).wait_for()
    assert setting.inner_text() == "RESOLUTE_COMPILE=before"
    browser.page.screenshot(path=screenshots / f"language-{language}-settings.png")
    browser.close_dialogs()

    # A template: found by what people search for, in this language and in English; its title, note, frames and nodes.
    title = template("compare_with_stock").replace(END, words[END])
    browser.browse_templates()
    for searched in (*SEARCHED[language], "faster", "compile", "speed up", "benchmark"):
        browser.page.locator("[role=dialog] input").first.fill(searched)
        browser.page.get_by_test_id(f"template-workflow-{title}").wait_for()
    browser.page.wait_for_function(PICTURE, arg=title)
    browser.page.screenshot(path=screenshots / f"language-{language}-templates.png")
    browser.choose_template(title, len(ui("compare_with_stock")["nodes"]))
    note = browser.page.evaluate(NOTE)
    assert note.splitlines()[0] == words["## The same seed, compiled and not"]
    assert not any(ENGLISH.search(line) for line in note.splitlines())
    assert set(browser.page.evaluate(GROUPS)) <= set(words.values()) | {"ControlNet"}
    assert TITLES[language] in browser.titles()
    browser.page.screenshot(path=screenshots / f"language-{language}-template.png")
