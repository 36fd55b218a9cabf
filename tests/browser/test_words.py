"""Chinese and Japanese: names of nodes, and the panel. The last file, because each language loads the page anew."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.browser.front_end import FrontEnd

pytestmark = pytest.mark.browser
TITLES = {"zh": "编译模型", "zh-TW": "編譯模型", "ja": "モデルをコンパイル"}


@pytest.mark.parametrize(
    "language", ["zh", pytest.param("zh-TW", marks=pytest.mark.long), pytest.param("ja", marks=pytest.mark.long)]
)
def test_names_and_the_panel_are_in_the_language_of_the_settings(
    browser: FrontEnd, screenshots: Path, language: str
) -> None:
    browser.load_page(language)
    browser.place(["ResoluteCompileModel", "ResoluteReport"])
    browser.open_panel()
    browser.page.screenshot(path=screenshots / f"language-{language}.png")
    assert TITLES[language] in browser.titles()
    assert "Warm up" not in browser.page.locator(".resolute-panel").inner_text()
    assert browser.cut_texts() == []
