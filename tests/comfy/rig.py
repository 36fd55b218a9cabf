"""Prompts with Resolute's nodes in them, what each of them cost, and what must be true of the results."""

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

from scripts.support.client import Client, History
from scripts.support.errors import PromptError

PromptDict = dict[str, dict[str, Any]]
Array = numpy.ndarray[Any, Any]

# What fp32 on the CPU may differ from ComfyUI's own: latents relatively, images in levels of 255.
LATENT_TOLERANCE = 1e-4
IMAGE_TOLERANCE = 1

# Bypasses that only forbid a capture, and so can only be met on a GPU.
AGAINST_CAPTURES = frozenset({"observed_input", "streamed_weights"})


def node(class_type: str, **inputs: Any) -> dict[str, Any]:
    """One node of a prompt in API form."""
    return {"class_type": class_type, "inputs": inputs}


def compile_model(backend: str = "inductor") -> dict[str, Any]:
    """A Compile Model node whose model is still to be connected."""
    return node("ResoluteCompileModel", backend=backend)


def with_model(prompt: PromptDict, *nodes: dict[str, Any], sampler: str = "sample") -> PromptDict:
    """A copy of the prompt with ``nodes``, in this order, between the sampler and its model."""
    changed = copy.deepcopy(prompt)
    link = changed[sampler]["inputs"]["model"]
    for number, added in enumerate(nodes):
        name = f"{sampler}-model-{number}"
        changed[name] = {**added, "inputs": {**added["inputs"], "model": link}}
        link = [name, 0]
    changed[sampler]["inputs"]["model"] = link
    return changed


def with_vae(prompt: PromptDict, backend: str = "inductor") -> PromptDict:
    """A copy of the prompt whose decoder node takes its VAE from Compile VAE Decode."""
    changed = copy.deepcopy(prompt)
    inputs = changed["decode"]["inputs"]
    changed["compiled-vae"] = node("ResoluteCompileVAEDecode", vae=inputs["vae"], backend=backend)
    inputs["vae"] = ["compiled-vae", 0]
    return changed


def compiled(prompt: PromptDict, backend: str = "inductor") -> PromptDict:
    """A copy of the prompt that samples, and decodes where it does, through the cache."""
    changed = with_model(prompt, compile_model(backend))
    return with_vae(changed, backend) if "decode" in prompt else changed


@dataclass(frozen=True)
class Run:
    """A finished prompt: the latents and images that it saved, previews left out, and by how much each counter rose."""

    latents: list[Array]
    images: list[Array]
    rise: dict[str, Any]
    history: History

    @property
    def bypasses(self) -> dict[str, int]:
        """Bypass code -> how often it was counted in this prompt."""
        counted: dict[str, int] = self.rise["bypasses"]
        return counted

    @property
    def forwards(self) -> int:
        """Calls that ran through regions or, on a GPU, were replayed."""
        return int(self.rise["graph_calls"] + self.rise["replays"])

    @property
    def touched_the_cache(self) -> bool:
        """Whether any counter moved."""
        return any(self.rise.values())


class Bench:
    """Runs prompts on one server and reads its counters before and after each."""

    def __init__(self, client: Client) -> None:
        self.client = client

    def counters(self) -> dict[str, Any]:
        """The totals of ``GET /resolute/cache``."""
        counters: dict[str, Any] = self.client.get("/resolute/cache")["counters"]
        return counters

    def run(self, prompt: PromptDict) -> Run:
        """Raises PromptError like ``Client.run``."""
        before = self.counters()
        history = self.client.run(prompt)
        return self.finished(history, before)

    def cancel_once(self, prompt: PromptDict, reached: Callable[[], bool]) -> str:
        """Queues a prompt, interrupts it as soon as ``reached()``, and returns the message with which it ended.

        A prompt that ends by itself fails the test with that message, or with pytest's for no error at all.
        """
        prompt_id = self.client.queue(prompt)
        while not reached() and prompt_id not in self.client.get(f"/history/{prompt_id}"):
            time.sleep(0.02)
        self.client.interrupt()
        with pytest.raises(PromptError) as caught:
            self.client.wait(prompt_id, timeout=120)
        return str(caught.value)

    def finished(self, history: History, before: Mapping[str, Any]) -> Run:
        """The Run of a prompt that was queued when the counters stood at ``before``."""
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


def latent_error(actual: Array, expected: Array) -> float:
    """The norm of the difference, relative to the norm of ``expected``."""
    return float(numpy.linalg.norm(actual - expected) / numpy.linalg.norm(expected))


def assert_same(actual: Run, expected: Run) -> None:
    """As many latents and images, and each of them within the tolerance; none of them empty, flat or not a number."""
    assert len(expected.latents) + len(expected.images) > 0, "the prompt saves nothing that could be compared"
    assert len(actual.latents) == len(expected.latents)
    assert len(actual.images) == len(expected.images)
    for mine, theirs in zip(actual.latents, expected.latents, strict=True):
        assert mine.shape == theirs.shape
        assert numpy.isfinite(theirs).all(), "the latents to compare with are no numbers"
        assert theirs.std() > 0, "the latents to compare with are empty"
        assert latent_error(mine, theirs) <= LATENT_TOLERANCE, latent_error(mine, theirs)
    for mine, theirs in zip(actual.images, expected.images, strict=True):
        assert mine.shape == theirs.shape
        assert theirs.std() > 5, f"the image to compare with is flat: deviation {theirs.std():.2f}"
        assert abs(mine - theirs).max() <= IMAGE_TOLERANCE, f"images differ by {abs(mine - theirs).max()} of 255"


def assert_different(one: Run, other: Run) -> None:
    """The latents differ by far more than what counts as the same: a node between them did something."""
    for mine, theirs in zip(one.latents, other.latents, strict=True):
        assert latent_error(mine, theirs) > 20 * LATENT_TOLERANCE, latent_error(mine, theirs)


def assert_ran_compiled(run: Run, forwards: int, bypasses: tuple[str, ...] = (), beside: Collection[str] = ()) -> None:
    """Nothing was compiled and nothing failed, and what ``assert_through_regions`` asserts."""
    assert_through_regions(run, forwards, bypasses, beside)
    assert run.rise["region_compiles"] == 0


def assert_through_regions(
    run: Run, forwards: int, bypasses: tuple[str, ...] = (), beside: Collection[str] = ()
) -> None:
    """Every forward ran through regions or was replayed, no region failed, and these codes were bypassed, ``beside``
    them at most those."""
    assert run.forwards == forwards
    assert run.rise["region_calls"] >= run.rise["graph_calls"]
    assert (run.rise["eager_calls"], run.rise["compile_failures"]) == (0, 0)
    assert set(bypasses) <= set(run.bypasses) <= {*bypasses, *beside}
