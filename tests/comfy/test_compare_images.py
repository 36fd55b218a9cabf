"""Compare Images on a real server: its texts and outputs, and how it fails a prompt."""

from __future__ import annotations

from typing import Any

import numpy
import pytest

from .rig import Bench, PromptDict, Run, failure_of, node

# All values are 100 of 255, or that plus 10 levels.
GREY, LIGHTER = 0x646464, 0x6E6E6E


def picture(color: int, *, width: int = 24, height: int = 16, batch: int = 1) -> dict[str, Any]:
    return node("EmptyImage", width=width, height=height, batch_size=batch, color=color)


def compare(a: str = "a", b: str = "b", max_error: float = 255, min_psnr: float = 0) -> dict[str, Any]:
    return node("ResoluteCompareImages", image_a=[a, 0], image_b=[b, 0], max_error=max_error, min_psnr=min_psnr)


def two_pictures(color_a: int, color_b: int, **limits: float) -> PromptDict:
    return {"a": picture(color_a), "b": picture(color_b), "compare": compare(**limits)}


def report_of(run: Run) -> list[str]:
    """The lines that the node shows."""
    (text,) = run.history["outputs"]["compare"]["text"]
    lines: list[str] = text.splitlines()
    return lines


def refusal(bench: Bench, prompt: PromptDict) -> str:
    """Run a prompt that must fail in Compare Images and return its message."""
    message = failure_of(bench.client, prompt)
    assert message.startswith("Node compare (ResoluteCompareImages) failed: ValueError: "), message
    return message.partition("ValueError: ")[2]


def test_it_runs_as_an_output_node_and_shows_its_text(bench: Bench) -> None:
    lines = report_of(bench.run(two_pictures(GREY, LIGHTER)))
    assert lines[0] == "1 image of 24x16 with 3 channels, A against B"
    # 10 of 255 everywhere: PSNR is 20 * log10(25.5).
    assert lines[2].split()[:4] == ["1", "10.00", "10.0000", "28.13"]
    assert "identical" in report_of(bench.run(two_pictures(LIGHTER, LIGHTER)))[2]


def test_its_numbers_and_text_can_be_used_by_other_nodes(bench: Bench) -> None:
    prompt = two_pictures(GREY, LIGHTER)
    shown = {"text": 0, "max_error": 2, "mean_error": 3, "psnr": 4, "ssim": 5}
    prompt |= {f"show-{name}": node("PreviewAny", source=["compare", slot]) for name, slot in shown.items()}
    run = bench.run(prompt)
    values = {name: run.history["outputs"][f"show-{name}"]["text"][0] for name in shown}
    assert values.pop("text").splitlines() == report_of(run)
    numbers = {name: float(value) for name, value in values.items()}
    assert numbers["max_error"] == pytest.approx(10, rel=1e-5)
    assert numbers["mean_error"] == pytest.approx(10, rel=1e-5)
    assert numbers["psnr"] == pytest.approx(20 * numpy.log10(25.5), abs=1e-4)
    a, b, c1 = 100 / 255, 110 / 255, 0.01**2
    assert numbers["ssim"] == pytest.approx((2 * a * b + c1) / (a**2 + b**2 + c1), abs=1e-5)


def test_the_heat_map_has_one_image_per_pair(bench: Bench) -> None:
    prompt = {"a": picture(GREY, batch=2), "one": picture(GREY), "two": picture(LIGHTER), "compare": compare()}
    prompt["b"] = node("ImageBatch", image1=["one", 0], image2=["two", 0])
    prompt["image"] = node("SaveImage", images=["compare", 1], filename_prefix="heat")
    run = bench.run(prompt)
    same, different = run.images
    assert same.shape == different.shape == (16, 24, 3)
    assert same.max() == 0
    assert (different == different[0, 0]).all() and different[0, 0].sum() > 500
    assert "identical" in report_of(run)[2] and report_of(run)[3].split()[1] == "10.00"


@pytest.mark.parametrize(
    ("limits", "limit"),
    [({"max_error": 9.5}, "max_error 9.5 of 255"), ({"min_psnr": 28.5}, "min_psnr 28.5 dB")],
)
def test_an_exceeded_limit_fails_the_prompt_with_the_numbers(
    bench: Bench, limits: dict[str, float], limit: str
) -> None:
    message = refusal(bench, two_pictures(GREY, LIGHTER, **limits))
    numbers = "max error 10.00 of 255, mean error 10.0000 of 255, PSNR 28.13 dB, SSIM 0.99"
    assert message.startswith(f"Image 1 of 1 is outside the limits ({limit}): {numbers}"), message
    assert bench.run(two_pictures(GREY, LIGHTER, max_error=10, min_psnr=28)).history["outputs"]["compare"]
