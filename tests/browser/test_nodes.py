"""Each node: found by search, with room for its text, in both renderers and in three more languages."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.support.front_end import FrontEnd

pytestmark = pytest.mark.browser
# What is typed into the search, and the title and class of the node that comes first.
WORDS = {
    "Compile Model": ("Compile Model", "ResoluteCompileModel"),
    "Compile VAE Decode": ("Compile VAE Decode", "ResoluteCompileVAEDecode"),
    "Compile ControlNet": ("Compile ControlNet", "ResoluteCompileControlNet"),
    "Load Checkpoint (Compiled)": ("Load Checkpoint (Compiled)", "ResoluteLoadCheckpoint"),
    "Graph Cache Report": ("Graph Cache Report", "ResoluteReport"),
    "psnr": ("Compare Images", "ResoluteCompareImages"),  # core has a Compare Images too
    "Warm Up": ("Warm Up", "ResoluteWarmUp"),
    "Free Graphs": ("Free Graphs", "ResoluteFree"),
}
ALIASES = {
    "aspect ratio": "Resolution",
    "tensorrt": "Compile Model",
    "cuda graph": "Compile Model",
    "torch compile": "Compile Model",
    "faster": "Compile Model",
}
LANGUAGES = {"zh": "编译模型", "zh-TW": "編譯模型", "ja": "モデルをコンパイル"}


def test_each_node_is_added_by_search_in_both_renderers(usual: FrontEnd, screenshots: Path) -> None:
    usual.start()
    for words, (title, class_name) in WORDS.items():
        usual.page.evaluate("() => app.graph.clear()")
        usual.add_by_search(words, title)
        assert usual.node_classes() == [class_name], words
    for vue in (False, True):
        usual.settings({"Comfy.VueNodes.Enabled": vue})
        usual.place([*(name for _, name in WORDS.values()), "ResoluteDeepCache", "ResoluteResolution"])
        usual.fit_view()
        usual.page.screenshot(path=screenshots / f"nodes{'-nodes2' if vue else ''}.png")
        assert usual.overlaps() == []
        assert usual.cut_texts() == []
        assert set(usual.texts()) == set(usual.titles())


def test_a_search_for_what_people_want_lists_the_node(usual: FrontEnd) -> None:
    usual.start()
    for words, title in ALIASES.items():
        usual.search(words, title)  # fails if the title does not come
        usual.page.keyboard.press("Escape")
        usual.page.wait_for_selector("[role=dialog]", state="detached")


@pytest.mark.parametrize("language", sorted(LANGUAGES))
def test_names_and_help_are_in_the_language_of_the_settings(usual: FrontEnd, screenshots: Path, language: str) -> None:
    usual.start()
    usual.settings({"Comfy.Locale": language})
    usual.start()
    usual.place(["ResoluteCompileModel", "ResoluteReport"])
    usual.open_panel()
    usual.fit_view()
    usual.page.screenshot(path=screenshots / f"language-{language}.png")
    assert LANGUAGES[language] in usual.titles()
    panel = usual.page.locator(".resolute-panel").inner_text()
    assert "Warm up" not in panel
    assert usual.cut_texts() == []
