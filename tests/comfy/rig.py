"""Builds prompts with Resolute's nodes, runs them with their counters, and compares results."""

from __future__ import annotations

import copy
import io
import time
import urllib.parse
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
from PIL import Image

from scripts.errors import PromptError
from scripts.server.client import PROMPT_TIMEOUT, Client, History
from scripts.server.events import Events, follow

PromptDict = dict[str, dict[str, Any]]
Array = numpy.ndarray[Any, Any]

# Tolerance against ComfyUI's own result in fp32 on the CPU: relative for latents, levels of 255 for images.
LATENT_TOLERANCE = 1e-4
IMAGE_TOLERANCE = 1

# Bypasses that only prevent a capture, so they occur only on a GPU.
AGAINST_CAPTURES = frozenset({"observed_input", "streamed_weights"})


def node(class_type: str, **inputs: Any) -> dict[str, Any]:
    """One node of a prompt in API form."""
    return {"class_type": class_type, "inputs": inputs}


def run_with_events(client: Client, prompt: PromptDict) -> Events:
    """Run a prompt and collect its messages. Raises what `Client.run` raises."""
    return follow(client, lambda: client.queue(prompt), PROMPT_TIMEOUT)


def tiny_prompt(
    *,
    seed: int = 1,
    kind: str = "sd",
    width: int = 256,
    height: int = 256,
    batch: int = 1,
    tokens: int = 77,
    steps: int = 4,
    cfg: float = 5.0,
) -> PromptDict:
    """A prompt of the test pack's tiny model. Nodes: model, vae, positive, negative, latent, sample, decode, image,
    samples.

    The names are the keys of the prompt, so that a test can insert nodes.
    """
    widths = {"sd": (768, 0), "small": (768, 0), "sdxl": (2048, 1280)}[kind]
    text = {"tokens": tokens, "width": widths[0], "pooled_width": widths[1], "batch": 1}
    return {
        "model": node("ResoluteTestTinyModel", seed=0, kind=kind),
        "vae": node("ResoluteTestTinyVAE", seed=0),
        "positive": node("ResoluteTestConditioning", seed=11, **text),
        "negative": node("ResoluteTestConditioning", seed=12, **text),
        "latent": node("EmptyLatentImage", width=width, height=height, batch_size=batch),
        "sample": _sampler(["model", 0], seed, steps, cfg),
        "decode": node("VAEDecode", samples=["sample", 0], vae=["vae", 0]),
        "image": node("SaveImage", images=["decode", 0], filename_prefix="tiny"),
        "samples": node("ResoluteTestSaveLatent", samples=["sample", 0], filename_prefix="tiny"),
    }


def checkpoint_prompt(
    checkpoint: str,
    *,
    text: str = "a lighthouse in the rain",
    seed: int = 1,
    width: int = 64,
    height: int = 64,
    batch: int = 1,
    steps: int = 2,
    cfg: float = 5.0,
) -> PromptDict:
    """Text to image from a checkpoint. Nodes: loader, positive, negative, latent, sample, decode, image, samples."""
    return {
        "loader": node("CheckpointLoaderSimple", ckpt_name=checkpoint),
        "positive": node("CLIPTextEncode", text=text, clip=["loader", 1]),
        "negative": node("CLIPTextEncode", text="", clip=["loader", 1]),
        "latent": node("EmptyLatentImage", width=width, height=height, batch_size=batch),
        "sample": _sampler(["loader", 0], seed, steps, cfg),
        "decode": node("VAEDecode", samples=["sample", 0], vae=["loader", 2]),
        "image": node("SaveImage", images=["decode", 0], filename_prefix="checkpoint"),
        "samples": node("ResoluteTestSaveLatent", samples=["sample", 0], filename_prefix="cp"),
    }


def _sampler(model: list[Any], seed: int, steps: int, cfg: float) -> dict[str, Any]:
    return node(
        "KSampler",
        model=model,
        positive=["positive", 0],
        negative=["negative", 0],
        latent_image=["latent", 0],
        seed=seed,
        steps=steps,
        cfg=cfg,
        sampler_name="euler",
        scheduler="normal",
        denoise=1.0,
    )


def compile_model(backend: str = "inductor") -> dict[str, Any]:
    """A Compile Model node without its model input."""
    return node("ResoluteCompileModel", backend=backend)


def with_model(prompt: PromptDict, *nodes: dict[str, Any], sampler: str = "sample") -> PromptDict:
    """A copy of the prompt with ``nodes`` between the sampler and its model, in this order."""
    changed = copy.deepcopy(prompt)
    link = changed[sampler]["inputs"]["model"]
    for number, added in enumerate(nodes):
        name = f"{sampler}-model-{number}"
        changed[name] = {**added, "inputs": {**added["inputs"], "model": link}}
        link = [name, 0]
    changed[sampler]["inputs"]["model"] = link
    return changed


def branches(prompt: PromptDict, of_each: dict[str, list[dict[str, Any]]]) -> PromptDict:
    """One sampler per branch, all on one model, each with its own nodes before it.

    Latents are saved in the order of the branches' names, which must have equal lengths.
    """
    changed = {name: part for name, part in prompt.items() if name not in ("sample", "samples")}
    for name, nodes in of_each.items():
        changed[name] = copy.deepcopy(prompt["sample"])
        changed[f"{name}-samples"] = copy.deepcopy(prompt["samples"])
        changed[f"{name}-samples"]["inputs"]["samples"] = [name, 0]
        changed = with_model(changed, *nodes, sampler=name)
    return changed


def without_decoder(prompt: PromptDict) -> PromptDict:
    """The prompt of the tiny model without its decoder: its latents are saved, and no image."""
    return {name: part for name, part in prompt.items() if name not in ("vae", "decode", "image")}


def with_sampling(prompt: PromptDict, **inputs: Any) -> PromptDict:
    """The prompt with other inputs of its sampler."""
    return {**prompt, "sample": {**prompt["sample"], "inputs": {**prompt["sample"]["inputs"], **inputs}}}


def with_vae(prompt: PromptDict, backend: str = "inductor") -> PromptDict:
    """A copy of the prompt whose decoder uses Compile VAE Decode."""
    changed = copy.deepcopy(prompt)
    inputs = changed["decode"]["inputs"]
    changed["compiled-vae"] = node("ResoluteCompileVAEDecode", vae=inputs["vae"], backend=backend)
    inputs["vae"] = ["compiled-vae", 0]
    return changed


def compiled(prompt: PromptDict, backend: str = "inductor") -> PromptDict:
    """A copy of the prompt with a compiled model, and a compiled decoder if the prompt decodes."""
    changed = with_model(prompt, compile_model(backend))
    return with_vae(changed, backend) if "decode" in prompt else changed


@dataclass(frozen=True)
class Run:
    """A finished prompt: its saved latents and images (no previews), and the increase of each counter."""

    latents: list[Array]
    images: list[Array]
    rise: dict[str, Any]
    history: History

    @property
    def bypasses(self) -> dict[str, int]:
        """Bypass code -> count in this prompt."""
        counted: dict[str, int] = self.rise["bypasses"]
        return counted

    @property
    def forwards(self) -> int:
        """Number of calls that ran through regions or, on a GPU, were replayed."""
        return int(self.rise["graph_calls"] + self.rise["replays"])

    @property
    def touched_the_cache(self) -> bool:
        """True if any counter changed, but for captures that went because ComfyUI needed their memory."""
        return any(count for name, count in self.rise.items() if name != "evictions")


class Bench:
    """Runs prompts on one server and reads its counters before and after each."""

    def __init__(self, client: Client) -> None:
        self.client = client

    def free(self) -> None:
        """Unload models and empty ComfyUI's caches before the next prompt. ComfyUI's worker may take a prompt first if
        one comes at once, so this queues one that does nothing.
        """
        self.client.free()
        self.client.run({"nothing": node("PreviewAny", source="nothing")})

    def counters(self) -> dict[str, Any]:
        """The totals of ``GET /resolute/cache``."""
        counters: dict[str, Any] = self.client.get("/resolute/cache")["counters"]
        return counters

    def run(self, prompt: PromptDict) -> Run:
        """Run a prompt. Raises PromptError like ``Client.run``."""
        before = self.counters()
        history = self.client.run(prompt)
        return self.finished(history, before)

    def signatures(self, prompt: PromptDict) -> tuple[Run, list[str]]:
        """Run a prompt, and return the text of each signature that was new in it.

        It compares times, not counts of events: the server keeps its latest events only, so their number stops growing.
        """
        latest = max((event["at"] for event in self._events()), default=0.0)
        run = self.run(prompt)
        new = [event for event in self._events() if event["kind"] == "signature" and event["at"] > latest]
        return run, [event["text"] for event in new]

    def texts(self, kind: str) -> list[str]:
        """The texts of the latest events of a kind."""
        return [event["text"] for event in self._events() if event["kind"] == kind]

    def _events(self) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = self.client.get("/resolute/events")["events"]
        return events

    def cancel_once(self, prompt: PromptDict, reached: Callable[[], bool]) -> str:
        """Queue a prompt, interrupt it as soon as ``reached()`` is true, and return its error message.

        The test fails if the prompt finishes without an error.
        """
        prompt_id = self.client.queue(prompt)
        while not reached() and prompt_id not in self.client.get(f"/history/{prompt_id}"):
            time.sleep(0.02)
        self.client.interrupt()
        with pytest.raises(PromptError) as caught:
            self.client.wait(prompt_id, timeout=120)
        return str(caught.value)

    def finished(self, history: History, before: Mapping[str, Any]) -> Run:
        """The Run of a finished prompt; ``before``: the counters when it was queued."""
        after = self.counters()
        rise = {name: after[name] - before[name] for name in after if name != "bypasses"}
        bypasses = {code: count - before["bypasses"].get(code, 0) for code, count in after["bypasses"].items()}
        rise["bypasses"] = {code: count for code, count in bypasses.items() if count}
        return Run(self._latents(history), self._images(history), rise, history)

    def _latents(self, history: History) -> list[Array]:
        return [numpy.load(io.BytesIO(data)) for data in self.client.images(history, "latents")]

    def _images(self, history: History) -> list[Array]:
        saved = [image for image in self.client.outputs(history, "images") if image["type"] == "output"]
        files = [self.client.raw("/view?" + urllib.parse.urlencode(image)) for image in saved]
        return [numpy.asarray(Image.open(io.BytesIO(data)).convert("RGB")).astype(int) for data in files]


def failure_of(client: Client, prompt: PromptDict) -> str:
    """Run a prompt that must fail and return its message."""
    with pytest.raises(PromptError) as caught:
        client.run(prompt)
    return str(caught.value)


def flux_prompt(prompt: PromptDict, file: str, width: int = 136, height: int = 104, batch: int = 1) -> PromptDict:
    """The prompt of the tiny model without its decoder, with a tiny Flux from a file in its place."""
    texts = {name: {**prompt[name], "inputs": dict(prompt[name]["inputs"])} for name in ("positive", "negative")}
    for text in texts.values():
        text["inputs"].update(width=4096, pooled_width=768)
    latent = node("EmptySD3LatentImage", width=width, height=height, batch_size=batch)
    model = node("UNETLoader", unet_name=file, weight_dtype="default")
    return with_sampling({**without_decoder(prompt), **texts, "model": model, "latent": latent}, cfg=1.0)


def latent_error(actual: Array, expected: Array) -> float:
    """The norm of the difference, relative to the norm of ``expected``."""
    return float(numpy.linalg.norm(actual - expected) / numpy.linalg.norm(expected))


def assert_same(actual: Run, expected: Run, tolerance: float = LATENT_TOLERANCE, levels: int = IMAGE_TOLERANCE) -> None:
    """Assert equal numbers of latents and images, all within the tolerance, and none of them empty, flat or NaN.

    levels: of 255, by which images may differ.
    """
    assert len(expected.latents) + len(expected.images) > 0, "the prompt saves nothing to compare"
    assert len(actual.latents) == len(expected.latents)
    assert len(actual.images) == len(expected.images)
    for mine, theirs in zip(actual.latents, expected.latents, strict=True):
        assert mine.shape == theirs.shape
        assert numpy.isfinite(theirs).all(), "the expected latents contain NaN or infinity"
        assert theirs.std() > 0, "the expected latents are empty"
        assert latent_error(mine, theirs) <= tolerance, latent_error(mine, theirs)
    for mine, theirs in zip(actual.images, expected.images, strict=True):
        assert mine.shape == theirs.shape
        assert theirs.std() > 5, f"the expected image is flat: deviation {theirs.std():.2f}"
        assert abs(mine - theirs).max() <= levels, f"images differ by {abs(mine - theirs).max()} of 255"


def assert_different(one: Run, other: Run) -> None:
    """Assert that the latents differ by far more than the tolerance, so the change between the runs took effect."""
    for mine, theirs in zip(one.latents, other.latents, strict=True):
        assert latent_error(mine, theirs) > 20 * LATENT_TOLERANCE, latent_error(mine, theirs)


def assert_ran_compiled(run: Run, forwards: int, bypasses: tuple[str, ...] = (), beside: Collection[str] = ()) -> None:
    """Assert what ``assert_through_regions`` does, and that nothing was compiled."""
    assert_through_regions(run, forwards, bypasses, beside)
    assert run.rise["region_compiles"] == 0


def assert_through_regions(
    run: Run, forwards: int, bypasses: tuple[str, ...] = (), beside: Collection[str] = ()
) -> None:
    """Assert that every forward ran through regions or was replayed, and no region failed.

    bypasses: codes that must occur; beside: codes that may occur too.
    """
    assert run.forwards == forwards
    assert run.rise["region_calls"] >= run.rise["graph_calls"]
    assert (run.rise["eager_calls"], run.rise["compile_failures"]) == (0, 0)
    assert set(bypasses) <= set(run.bypasses) <= {*bypasses, *beside}
