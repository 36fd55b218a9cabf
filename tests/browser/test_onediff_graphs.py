"""Convert all OneDiff nodes on three graphs as OneDiff's users have them: the same work, run, and undone by one key."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scripts.workflows import CONTROL_NET, LCM_LORA, SD15

from ..comfy.rig import node
from .front_end import FrontEnd
from .prompts import EAGER, stock

pytestmark = pytest.mark.browser
TYPES = "() => app.graph.nodes.map(node => node.type).sort()"
# ComfyUI takes no further key while it restores the state before.
UNDONE = """() => {
    const tracker = app.extensionManager.workflow.activeWorkflow.changeTracker;
    return tracker.redoQueue.length > 0 && !tracker._restoringState;
}"""
Prompt = dict[str, Any]
CACHE = {"cache_interval": 4, "cache_layer_id": 1, "cache_block_id": 2, "start_step": 100, "end_step": 900}
DEEP_CACHE = {
    "interval": 4, "depth": 5, "start_percent": 0.1, "end_percent": 0.9, "schedule": "uniform", "power": 1.4,
    "centre": 15,
}  # fmt: skip


def deep_cache() -> Prompt:
    """One model with DeepCache, its VAE sped up too."""
    prompt = stock(width=72, height=64)
    prompt["8"] = node("ModuleDeepCacheSpeedup", model=["1", 0], static_mode="enable", **CACHE)
    prompt["9"] = node("VaeSpeedup", vae=["1", 2], inplace=False)
    prompt["5"]["inputs"]["model"] = ["8", 0]
    prompt["6"]["inputs"]["vae"] = ["9", 0]
    return prompt


def loras() -> Prompt:
    """OneDiff's loader, and two LoRAs behind it."""
    prompt = stock(width=72, height=64)
    prompt["1"] = node("OneDiffCheckpointLoaderSimple", ckpt_name=SD15, vae_speedup="enable")
    for number, source in ((8, "1"), (9, "8")):
        prompt[str(number)] = node("LoraLoaderModelOnly", model=[source, 0], lora_name=LCM_LORA, strength_model=0.5)
    prompt["5"]["inputs"]["model"] = ["9", 0]
    return prompt


def boosters() -> Prompt:
    """A speed-up node with boosters, a ControlNet, and nodes that have nothing to do any more."""
    prompt = stock(width=72, height=64)
    prompt["8"] = node("OneFlowDeepcacheBooster", **CACHE)
    prompt["9"] = node("OneDiffTorchCompileBooster", disable=True)
    prompt["10"] = node("OneDiffModelBooster", deepcache_booster=["8", 0], torchcompile_booster=["9", 0])
    prompt["11"] = node("ModelSpeedup", model=["1", 0], custom_booster=["10", 0], inplace=False)
    prompt["12"] = node("BatchSizePatcher", model=["11", 0], latent_image=["4", 0])
    prompt["13"] = node("OneDiffControlNetLoader", control_net_name=CONTROL_NET)
    prompt["14"] = node("EmptyImage", width=72, height=64, batch_size=1, color=0)
    prompt["15"] = node(
        "ControlNetApplyAdvanced", positive=["2", 0], negative=["3", 0], control_net=["13", 0], image=["14", 0],
        strength=1.0, start_percent=0.0, end_percent=1.0,
    )  # fmt: skip
    prompt["5"]["inputs"] |= {"model": ["12", 0], "positive": ["15", 0], "negative": ["15", 1]}
    return prompt


def taken(prompt: Prompt, name: str, key: str) -> tuple[str, Prompt]:
    """Id and node of what an input of the only node of a class takes."""
    source = next(part for part in prompt.values() if part["class_type"] == name)["inputs"][key][0]
    return source, prompt[source]


def check_deep_cache(prompt: Prompt) -> None:
    _, cache = taken(prompt, "KSampler", "model")
    assert (cache["class_type"], {**cache["inputs"], "model": None}) == (
        "ResoluteDeepCache", {**DEEP_CACHE, "model": None}
    )  # fmt: skip
    _, model = taken(prompt, "ResoluteDeepCache", "model")
    assert (model["class_type"], model["inputs"]["model"]) == ("ResoluteCompileModel", ["1", 0])


def check_vae(prompt: Prompt) -> None:
    check_deep_cache(prompt)
    _, vae = taken(prompt, "VAEDecode", "vae")
    assert (vae["class_type"], vae["inputs"]["vae"]) == ("ResoluteCompileVAEDecode", ["1", 2])


def check_loras(prompt: Prompt) -> None:
    loader = next(name for name, part in prompt.items() if part["class_type"] == "ResoluteLoadCheckpoint")
    assert prompt[loader]["inputs"] == {"ckpt_name": SD15, "backend": "auto", "compile_vae": True}
    assert prompt["5"]["inputs"]["model"] == ["9", 0]
    assert prompt["8"]["inputs"]["model"] == [loader, 0]
    assert prompt["6"]["inputs"]["vae"] == [loader, 2]


def check_boosters(prompt: Prompt) -> None:
    check_deep_cache(prompt)
    _, model = taken(prompt, "ResoluteDeepCache", "model")
    assert model["inputs"]["backend"] == "eager", "the Torch Compile Booster was switched off"
    _, control = taken(prompt, "ControlNetApplyAdvanced", "control_net")
    assert control["class_type"] == "ResoluteCompileControlNet"
    source, loader = taken(prompt, "ResoluteCompileControlNet", "control_net")
    assert (loader["class_type"], loader["inputs"]) == ("ControlNetLoader", {"control_net_name": CONTROL_NET})
    assert control["inputs"]["control_net"] == [source, 0]


@pytest.mark.parametrize(
    ("make", "count", "check"),
    [(deep_cache, 2, check_vae), (loras, 1, check_loras), (boosters, 6, check_boosters)],
    ids=["deep-cache", "loras", "boosters"],
)
def test_a_graph_is_converted_runs_and_one_key_takes_it_back(
    page: FrontEnd, screenshots: Path, make: Callable[[], Prompt], count: int, check: Callable[[Prompt], None]
) -> None:
    page.load_prompt(make())
    # As from a file: the first undo of a graph in API form adds empty lists of widgets to nodes without any, and at the
    # next key ComfyUI takes these for a change and forgets what to redo.
    page.load(page.page.evaluate("() => app.graph.serialize()"), make.__name__)
    before, stock_prompt = page.page.evaluate(TYPES), page.prompt()
    page.open_panel()
    convert = page.page.locator("[data-action=convert]")
    convert.click()
    nodes = "1 OneDiff node" if count == 1 else f"{count} OneDiff nodes"
    page.page.locator(".resolute-said", has_text=f"Converted {nodes}. Ctrl+Z takes all back.").wait_for()
    convert.wait_for(state="hidden")
    page.fit_view()
    page.page.screenshot(path=screenshots / f"onediff-{make.__name__}.png")
    assert page.overlaps() == []
    check(page.prompt())
    page.page.locator("canvas#graph-canvas").focus()
    page.page.keyboard.press("Control+z")
    page.page.wait_for_function(f"before => JSON.stringify(({TYPES})()) === JSON.stringify(before)", arg=before)
    assert page.prompt() == stock_prompt
    page.page.wait_for_function(UNDONE)
    page.page.keyboard.press("Control+y")
    convert.wait_for(state="hidden")
    page.widgets(EAGER)
    page.queue()
    assert page.wait()["name"] == "execution_success"
    assert page.pictures() == {"Save Image": 1}
