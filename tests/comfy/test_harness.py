"""The test harness itself: servers, the test pack and the generated models work as the tests expect."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
from PIL import Image

from scripts.errors import PromptError, ServerError
from scripts.server.client import Client
from scripts.server.events import run_with_events
from scripts.server.process import ComfyServer
from scripts.setup import comfyui

TEST_NODES = {
    "ResoluteTestConditioning",
    "ResoluteTestFailingPatch",
    "ResoluteTestSaveLatent",
    "ResoluteTestTinyModel",
    "ResoluteTestTinyVAE",
}


def assert_a_picture(image: numpy.ndarray[Any, Any]) -> None:
    """Assert that an image is neither black, which ComfyUI saves for NaN, nor one flat colour."""
    assert image.std() > 5, f"mean {image.mean():.1f}, deviation {image.std():.1f}"


def test_the_server_has_the_test_pack(client: Client) -> None:
    assert client.get("/object_info").keys() >= TEST_NODES


def test_a_tiny_prompt_is_deterministic_and_uses_its_seed(client: Client, tiny_prompt: Any, latents: Any) -> None:
    first = latents(client, client.run(tiny_prompt(seed=1)))[0]
    other = latents(client, client.run(tiny_prompt(seed=2)))[0]
    again = latents(client, client.run(tiny_prompt(seed=1)))[0]
    assert first.shape == (1, 4, 32, 32)
    assert numpy.isfinite(first).all()
    assert numpy.array_equal(first, again)
    assert not numpy.allclose(first, other)


@pytest.mark.parametrize("kind", ["sd", "sdxl"])
@pytest.mark.parametrize("size", [(256, 256), (264, 200)])
def test_a_tiny_prompt_makes_an_image(
    client: Client, tiny_prompt: Any, pixels: Any, kind: str, size: tuple[int, int]
) -> None:
    history = client.run(tiny_prompt(kind=kind, width=size[0], height=size[1], batch=2, tokens=154))
    images = pixels(client, history)
    assert [image.shape for image in images] == [(size[1], size[0], 3)] * 2
    for image in images:
        assert_a_picture(image)


def test_sd15_mini_makes_an_image_from_text(
    client: Client, make_model: Any, checkpoint_prompt: Any, pixels: Any
) -> None:
    image = pixels(client, client.run(checkpoint_prompt(make_model("sd15-mini"))))[0]
    assert image.shape == (64, 64, 3)
    assert_a_picture(image)


def test_sd15_mini_depends_on_its_text(client: Client, make_model: Any, checkpoint_prompt: Any, latents: Any) -> None:
    name = make_model("sd15-mini")
    first = latents(client, client.run(checkpoint_prompt(name, text="a cat")))[0]
    other = latents(client, client.run(checkpoint_prompt(name, text="a dog")))[0]
    assert not numpy.allclose(first, other)


def test_sd15_mini_makes_an_image_from_an_image(
    server: ComfyServer, make_model: Any, checkpoint_prompt: Any, node: Any, pixels: Any
) -> None:
    noise = numpy.random.default_rng(0).integers(0, 255, (64, 72, 3), dtype=numpy.uint8)
    Image.fromarray(noise).save(server.input_folder / "noise.png")
    prompt = checkpoint_prompt(make_model("sd15-mini"))
    prompt["load"] = node("LoadImage", image="noise.png")
    prompt["latent"] = node("VAEEncode", pixels=["load", 0], vae=["loader", 2])
    prompt["sample"]["inputs"]["denoise"] = 0.5
    image = pixels(server.client, server.client.run(prompt))[0]
    assert image.shape == (64, 72, 3)
    assert_a_picture(image)


def test_sdxl_mini_makes_an_image(
    client: Client, make_model: Any, checkpoint_prompt: Any, node: Any, pixels: Any
) -> None:
    prompt = checkpoint_prompt(make_model("sdxl-mini"))
    text = {"tokens": 77, "width": 2048, "pooled_width": 1280, "batch": 1}
    prompt["positive"] = node("ResoluteTestConditioning", seed=1, **text)
    prompt["negative"] = node("ResoluteTestConditioning", seed=2, **text)
    assert_a_picture(pixels(client, client.run(prompt))[0])


def test_flux_tiny_samples(client: Client, make_model: Any, tiny_prompt: Any, node: Any, latents: Any) -> None:
    prompt = tiny_prompt(cfg=1.0, steps=2)
    name = make_model("flux-tiny")
    prompt["model"] = node("UNETLoader", unet_name=name, weight_dtype="default")
    for key in ("positive", "negative"):
        prompt[key]["inputs"].update(width=4096, pooled_width=768)
    prompt["latent"] = node("EmptySD3LatentImage", width=64, height=64, batch_size=1)
    for key in ("decode", "image"):
        del prompt[key]
    samples = latents(client, client.run(prompt))[0]
    assert samples.shape == (1, 16, 8, 8)
    assert numpy.isfinite(samples).all()


def test_a_failure_in_a_node_names_the_node(client: Client, tiny_prompt: Any, node: Any) -> None:
    prompt = tiny_prompt()
    prompt["failing"] = node("ResoluteTestFailingPatch", model=["model", 0], step=2)
    prompt["sample"]["inputs"]["model"] = ["failing", 0]
    with pytest.raises(PromptError, match=r"sample \(KSampler\).*asked to fail at step 2"):
        client.run(prompt)
    client.run(tiny_prompt())


def test_events_show_the_progress_of_the_sampler(client: Client, tiny_prompt: Any) -> None:
    events = run_with_events(client, tiny_prompt(steps=3, seed=77))
    steps = [data["value"] for data in events.of_type("progress") if data["node"] == "sample"]
    # ComfyUI skips progress messages of fast steps, but never that of the last one.
    assert steps == sorted(set(steps))
    assert steps[-1] == 3
    assert events.history["status"]["completed"]


def test_a_rejected_prompt_names_the_input(client: Client, tiny_prompt: Any) -> None:
    prompt = tiny_prompt(kind="sd")
    prompt["model"]["inputs"]["kind"] = "nonsense"
    with pytest.raises(PromptError, match=r"node model .*nonsense"):
        client.run(prompt)


def test_a_server_that_dies_shows_its_log(comfyui_folder: Callable[[str], Path], tmp_path: Path) -> None:
    folder = comfyui_folder(comfyui.TARGET)
    server = ComfyServer(Path(sys.executable), folder, tmp_path, arguments=["--no-such-flag"])
    with pytest.raises(ServerError, match=r"(?s)ended with code 2 .*--no-such-flag"):
        server.start()
    assert server.process is None


def test_a_cancelled_prompt_says_so_and_the_next_one_runs(client: Client, tiny_prompt: Any) -> None:
    prompt_id = client.queue(tiny_prompt(steps=2000, seed=78))
    while not client.get("/queue")["queue_running"]:
        time.sleep(0.05)
    time.sleep(1)
    client.interrupt()
    with pytest.raises(PromptError, match="interrupted in node sample"):
        client.wait(prompt_id, timeout=60)
    client.run(tiny_prompt(seed=79))
