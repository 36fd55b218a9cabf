"""The badge, the panel, progress, Cancel and errors, as a user sees them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from scripts.support.front_end import FrontEnd
from scripts.support.server import ComfyServer

from ..comfy.rig import compiled, node

pytestmark = pytest.mark.browser


def tiny(seed: int = 1, kind: str = "sd", **size: int) -> dict[str, Any]:
    """A compiled prompt of the test pack's tiny model, as it may be loaded into the front end."""
    width = {"sd": 768, "sdxl": 2048}[kind]
    pooled = {"sd": 0, "sdxl": 1280}[kind]
    text = {"tokens": 77, "width": width, "pooled_width": pooled, "batch": 1}
    sampling = {"seed": seed, "steps": 2, "cfg": 5.0, "sampler_name": "euler", "scheduler": "normal", "denoise": 1.0}
    links = {"model": ["1", 0], "positive": ["3", 0], "negative": ["4", 0], "latent_image": ["5", 0]}
    named = compiled(
        {
            "1": node("ResoluteTestTinyModel", seed=0, kind=kind),
            "2": node("ResoluteTestTinyVAE", seed=0),
            "3": node("ResoluteTestConditioning", seed=11, **text),
            "4": node("ResoluteTestConditioning", seed=12, **text),
            "5": node("EmptyLatentImage", width=size.get("width", 136), height=size.get("height", 104), batch_size=1),
            "sample": node("KSampler", **links, **sampling),
            "decode": node("VAEDecode", samples=["sample", 0], vae=["2", 0]),
            "8": node("SaveImage", images=["decode", 0], filename_prefix="tiny"),
        }
    )
    numbers = {name: str(index) for index, name in enumerate(named, 1)}
    return {
        numbers[name]: {
            **part,
            "inputs": {
                key: [numbers[value[0]], value[1]] if isinstance(value, list) else value
                for key, value in part["inputs"].items()
            },
        }
        for name, part in named.items()
    }


def test_the_panel_follows_a_warm_up_and_a_free(usual: FrontEnd, server: ComfyServer, screenshots: Path) -> None:
    usual.start()
    usual.load_prompt(tiny(width=128, height=96))
    usual.open_panel()
    page = usual.page
    assert re.fullmatch(r"\d+ regions, \d+ sizes ready", page.locator(".resolute-badge").inner_text())
    page.evaluate("() => { window.resoluteEnd = null; }")
    usual.watch()
    page.locator("[data-action=warm-up]").click()
    assert usual.wait()["name"] == "execution_success"
    page.wait_for_function("() => document.querySelector('.resolute-panel').innerText.includes('128x96')")
    assert page.locator(".resolute-prompt").count() > 0
    assert "Queued: 128x96" in page.locator(".resolute-said").inner_text()
    page.screenshot(path=screenshots / "panel-dark.png")
    usual.watch()
    page.locator("[data-action=free]").click()
    assert usual.wait()["name"] == "execution_success"
    page.locator("[data-action=copy]").click()
    page.wait_for_function("() => document.querySelector('.resolute-said').innerText.includes('clipboard')")
    assert "region compiles" in page.evaluate("() => navigator.clipboard.readText()")
    assert usual.cut_texts() == []


def test_the_panel_works_in_light_colours_and_a_narrow_window(usual: FrontEnd, screenshots: Path) -> None:
    usual.start()
    usual.settings({"Comfy.ColorPalette": "light"})
    usual.open_panel()
    usual.page.screenshot(path=screenshots / "panel-light.png")
    assert usual.contrast(".resolute-panel h2") > 4.5
    assert usual.contrast(".resolute-button") > 4.5
    usual.page.set_viewport_size({"width": 700, "height": 800})
    usual.page.wait_for_timeout(800)
    usual.page.screenshot(path=screenshots / "panel-narrow.png")
    assert usual.cut_texts() == []
    box = usual.page.locator(".resolute-panel").bounding_box()
    assert box is not None
    assert box["x"] + box["width"] <= 700


def test_the_panel_is_reached_and_named_without_a_mouse(usual: FrontEnd) -> None:
    usual.start()
    usual.page.locator(".resolute-badge").focus()
    usual.page.keyboard.press("Enter")
    usual.page.wait_for_selector(".resolute-panel")
    assert usual.page.get_by_role("region", name="Resolute").count() == 1
    usual.page.locator("[data-action=warm-up]").focus()
    usual.page.keyboard.press("Tab")
    assert usual.page.evaluate("() => document.activeElement.dataset.action") == "free"
    assert "Resolute" in usual.page.locator(".resolute-badge").get_attribute("aria-label")


def test_compiling_shows_its_progress_and_cancel_answers_at_once(usual: FrontEnd, screenshots: Path) -> None:
    usual.start()
    usual.load_prompt(tiny(kind="sdxl", seed=7))
    usual.queue()
    usual.page.wait_for_function("() => window.resoluteTexts.some(t => /^compiling [2-9] of/.test(t))", timeout=600_000)
    assert "compiling" in usual.page.locator(".resolute-badge").inner_text()
    usual.page.screenshot(path=screenshots / "compiling.png")
    usual.page.evaluate("() => app.api.interrupt(null)")
    assert usual.wait()["name"] == "execution_interrupted"
    texts = usual.progress_texts()
    assert any(re.fullmatch(r"compiling \d+ of \d+, \d+ s", text) for text in texts), texts
    assert any(re.fullmatch(r"stops after this region; \d+ of \d+ are kept", text) for text in texts), texts


def test_a_wrong_size_is_said_on_the_node_and_in_a_message(usual: FrontEnd, screenshots: Path) -> None:
    usual.start()
    size = node("ResoluteResolution", preset="custom", width=1001, height=700, multiple="8", use="exact")
    picture = node("EmptyImage", width=["1", 0], height=["1", 1], batch_size=1, color=0)
    usual.load_prompt({"1": size, "2": picture, "3": node("PreviewImage", images=["2", 0])})
    usual.queue()
    end = usual.wait()
    sentence = "Size 1001x700: width and height must be multiples of 8 between 64 and 8192. The nearest valid size is "
    assert end["detail"]["exception_message"].startswith(sentence)
    assert any(text.startswith(sentence) for text in usual.texts().values())
    usual.page.wait_for_function(f"() => document.body.innerText.includes({sentence!r})")
    usual.page.screenshot(path=screenshots / "wrong-size.png")


def test_an_error_of_ours_has_a_short_name(usual: FrontEnd) -> None:
    usual.start()
    warm = node("ResoluteWarmUp", sizes="x" * 5_000, batch_sizes="1", prompt_chunks="1", cfg=7.0)
    usual.load_prompt({"1": warm})
    usual.queue()
    detail = usual.wait()["detail"]
    assert detail["exception_type"] == "resolute.UserError"
    assert len(detail["exception_message"]) < 300
