"""Compare Images against values computed with numpy or by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy
import pytest
import torch

OFF = {"max_error": 255.0, "min_psnr": 0.0}
LEVEL = 1 / 255

Array = numpy.ndarray[Any, Any]


@pytest.fixture(scope="module")
def comparison(pack: Any) -> Any:
    return pack("nodes.adapters.report.image_comparison")


def flat(value: float, *, height: int = 16, width: int = 20, batch: int = 1) -> torch.Tensor:
    """An image (batch, height, width, 3) of one value."""
    return torch.full((batch, height, width, 3), value)


def noise(*, seed: int = 0, height: int = 24, width: int = 31, batch: int = 1, channels: int = 3) -> torch.Tensor:
    return torch.rand((batch, height, width, channels), generator=torch.Generator().manual_seed(seed))


def ssim_of(a: Array, b: Array, window: int = 11) -> float:
    """SSIM as in Wang et al. 2004, one window at a time. a, b: (height, width, channels)."""
    at = numpy.arange(window) - window // 2
    line = numpy.exp(-(at**2) / (2 * 1.5**2))
    weights = numpy.outer(line, line) / line.sum() ** 2
    c1, c2 = 0.01**2, 0.03**2
    values = []
    for channel in range(a.shape[2]):
        for y in range(a.shape[0] - window + 1):
            for x in range(a.shape[1] - window + 1):
                one, other = (image[y : y + window, x : x + window, channel].astype(float) for image in (a, b))
                mean_a, mean_b = (weights * one).sum(), (weights * other).sum()
                spread_a, spread_b = (weights * (one - mean_a) ** 2).sum(), (weights * (other - mean_b) ** 2).sum()
                shared = (weights * (one - mean_a) * (other - mean_b)).sum()
                above = (2 * mean_a * mean_b + c1) * (2 * shared + c2)
                values.append(above / ((mean_a**2 + mean_b**2 + c1) * (spread_a + spread_b + c2)))
    return float(numpy.mean(values))


@pytest.mark.parametrize(("difference", "psnr"), [(0.1, 20.0), (0.01, 40.0), (LEVEL, 48.1308), (0.5, 6.0206)])
def test_a_shift_of_all_values_has_the_psnr_of_its_square(comparison: Any, difference: float, psnr: float) -> None:
    found = comparison.compare(flat(0.25), flat(0.25 + difference))
    assert found.psnr == pytest.approx(psnr, abs=1e-3)
    assert found.max_error == pytest.approx(difference * 255, rel=1e-5)
    assert found.mean_error == pytest.approx(difference * 255, rel=1e-5)


def test_one_wrong_value_is_counted_once(comparison: Any) -> None:
    a, b = flat(0.5), flat(0.5)
    b[0, 3, 7, 1] += 51 / 255
    found = comparison.compare(a, b)
    values = 16 * 20 * 3
    assert found.max_error == pytest.approx(51, rel=1e-5)
    assert found.mean_error == pytest.approx(51 / values, rel=1e-5)
    assert found.psnr == pytest.approx(10 * math.log10(values / 0.2**2), abs=1e-4)


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize(("height", "width"), [(24, 31), (11, 11), (12, 40)])
def test_every_number_equals_numpys(comparison: Any, height: int, width: int, channels: int) -> None:
    a = noise(height=height, width=width, channels=channels)
    b = (a + 0.2 * noise(seed=1, height=height, width=width, channels=channels)).clamp(0, 1)
    found = comparison.compare(a, b)
    one, other = a[0].double().numpy(), b[0].double().numpy()
    assert found.max_error == pytest.approx(abs(one - other).max() * 255, rel=1e-9)
    assert found.mean_error == pytest.approx(abs(one - other).mean() * 255, rel=1e-9)
    assert found.psnr == pytest.approx(-10 * numpy.log10(((one - other) ** 2).mean()), rel=1e-9)
    assert found.ssim == pytest.approx(ssim_of(one, other), abs=1e-9)
    assert 0.1 < found.ssim < 0.99, "too near to either end to tell metrics apart"


@pytest.mark.parametrize("value", [noise(), flat(0.0), flat(1.0)], ids=["noise", "black", "white"])
def test_identical_images_are_called_identical(comparison: Any, value: torch.Tensor) -> None:
    found = comparison.compare(value, value.clone())
    assert (found.max_error, found.mean_error, found.psnr, found.ssim) == (0, 0, math.inf, 1)
    assert "identical" in comparison.report(found, **OFF)
    assert not found.heat_map.any()
    assert comparison.failure(found, 0.0, 200.0) is None


@pytest.mark.parametrize(("height", "width", "window"), [(10, 40, 9), (5, 8, 5), (2, 2, 1), (1, 1, 1), (40, 4, 3)])
def test_a_small_image_gets_a_smaller_window_and_the_report_says_so(
    comparison: Any, height: int, width: int, window: int
) -> None:
    a, b = noise(height=height, width=width), noise(seed=1, height=height, width=width)
    found = comparison.compare(a, b)
    assert found.ssim == pytest.approx(ssim_of(a[0].double().numpy(), b[0].double().numpy(), window), abs=1e-9)
    assert f"SSIM with a window of {window}x{window}" in comparison.report(found, **OFF)
    assert "SSIM with a window" not in comparison.report(comparison.compare(noise(), noise()), **OFF)


def test_half_precision_images_are_compared_exactly(comparison: Any) -> None:
    a = noise().half()
    b = (a + 0.125).half()
    found = comparison.compare(a, b)
    assert found.max_error == pytest.approx(float((b.double() - a.double()).max()) * 255, rel=1e-12)


def test_a_batch_is_reported_per_pair_and_as_a_whole(comparison: Any) -> None:
    a = flat(0.5, batch=3)
    b = a + torch.tensor([0.0, 0.1, 0.01]).view(3, 1, 1, 1)
    found = comparison.compare(a, b)
    assert [scores.psnr for scores in found.scores] == pytest.approx([math.inf, 20, 40], abs=1e-3)
    assert found.max_error == pytest.approx(25.5, rel=1e-5)
    assert found.mean_error == pytest.approx(0.11 * 255 / 3, rel=1e-5)
    assert found.psnr == pytest.approx(20, abs=1e-4)
    assert found.ssim == min(scores.ssim for scores in found.scores)
    lines = comparison.report(found, **OFF).splitlines()
    assert lines[0] == "3 images of 20x16 with 3 channels, A against B"
    assert lines[2].split()[0] == "1" and "identical" in lines[2]
    assert lines[3].split() == ["2", "25.50", "25.5000", "20.00", f"{found.scores[1].ssim:.5f}"]
    assert lines[5].split()[:4] == ["all", "25.50", "9.3500", "20.00"]


class TestTheHeatMap:
    def test_is_black_where_nothing_differs_and_brightest_at_the_largest_error(self, comparison: Any) -> None:
        a, b = flat(0.5, batch=2), flat(0.5, batch=2)
        b[0, 2, 3] += 20 * LEVEL
        b[1, 4, 5, 2] -= 80 * LEVEL
        found = comparison.compare(a, b)
        brightness = found.heat_map.sum(dim=-1)
        assert found.heat_map.shape == (2, 16, 20, 3)
        assert found.heat_map.dtype == torch.float32
        assert (found.heat_map.min(), found.heat_map.max()) == (0, 1)
        assert brightness.nonzero().tolist() == [[0, 2, 3], [1, 4, 5]]
        assert brightness[1, 4, 5] == brightness.max() > 2 * brightness[0, 2, 3]
        assert found.scale == pytest.approx(80, rel=1e-5)
        assert "pale yellow is 80.00 of 255 in every image" in comparison.report(found, **OFF)

    def test_gets_brighter_with_the_error(self, comparison: Any) -> None:
        a = flat(0.0, width=256)
        b = torch.linspace(0, 1, 256).view(1, 1, 256, 1).expand_as(a)
        brightness = comparison.compare(a, b).heat_map[0, 0].sum(dim=-1)
        assert (brightness.diff() > 0).all()

    def test_stays_dark_for_errors_below_one_level(self, comparison: Any) -> None:
        found = comparison.compare(flat(0.5), flat(0.5) + 0.1 * LEVEL)
        assert found.scale == 1
        assert 0 < found.heat_map.max() < 0.25


class TestValuesThatAreNoNumbers:
    @pytest.mark.parametrize("value", [math.nan, math.inf])
    @pytest.mark.parametrize("which", ["image_a", "image_b"])
    def test_are_reported_with_their_image_and_do_not_fail_a_prompt_without_a_limit(
        self, comparison: Any, which: str, value: float
    ) -> None:
        images = {"image_a": noise(batch=2), "image_b": noise(seed=1, batch=2)}
        images[which][1, 4, 6, :2] = value
        found = comparison.compare(**images)
        text = comparison.report(found, **OFF)
        assert f"\n2      no scores: {which} holds 2 NaN or infinite values (of {24 * 31 * 3})" in text
        assert math.isfinite(found.scores[0].psnr) and math.isnan(found.scores[1].psnr)
        assert all(math.isnan(v) for v in (found.max_error, found.mean_error, found.psnr, found.ssim))
        assert comparison.failure(found, **OFF) is None
        assert found.heat_map.isfinite().all()
        assert found.heat_map[1, 4, 6].tolist() == [0, 1, 0]
        assert (found.heat_map == torch.tensor([0.0, 1.0, 0.0])).all(dim=-1).sum() == 1

    def test_in_both_images_at_once_are_not_called_identical(self, comparison: Any) -> None:
        a = flat(math.nan)
        found = comparison.compare(a, a.clone())
        text = comparison.report(found, **OFF)
        assert "identical" not in text
        assert "image_a holds 960 NaN" in text and "image_b holds 960 NaN" in text

    @pytest.mark.parametrize("limits", [(254.0, 0.0), (255.0, 1.0)])
    def test_fail_any_limit(self, comparison: Any, limits: tuple[float, float]) -> None:
        a, b = flat(0.5, batch=2), flat(0.5, batch=2)
        b[1, 0, 0, 0] = math.nan
        message = comparison.failure(comparison.compare(a, b), *limits)
        assert message.startswith("Image 2 of 2 cannot be compared: image_b holds 1 NaN")


class TestALimit:
    @pytest.mark.parametrize("level", [1, 2, 100, 254])
    def test_of_whole_levels_lets_exactly_those_pass(self, comparison: Any, level: int) -> None:
        pixels = torch.arange(256)[:-level].float()
        a = (pixels / 255).view(1, 1, -1, 1).expand(1, 12, -1, 3)
        b = ((pixels + level) / 255).view(1, 1, -1, 1).expand(1, 12, -1, 3)
        found = comparison.compare(a, b)
        assert comparison.failure(found, float(level), 0.0) is None
        assert comparison.failure(found, level - 0.5, 0.0) is not None

    def test_names_the_numbers_the_image_and_the_limit(self, comparison: Any) -> None:
        a = flat(0.5, batch=3)
        b = a + torch.tensor([0.0, 0.01, 0.1]).view(3, 1, 1, 1)
        message = comparison.failure(comparison.compare(a, b), 4.0, 0.0)
        assert message.startswith(
            "Image 3 of 3 is outside the limits (max_error 4 of 255): max error 25.50 of 255, mean error 25.5000"
        )
        assert "PSNR 20.00 dB, SSIM 0." in message
        assert "that fail" not in message

    def test_of_psnr_names_the_worst_image_and_how_many_fail(self, comparison: Any) -> None:
        a = flat(0.5, batch=3)
        b = a + torch.tensor([0.0, 0.01, 0.1]).view(3, 1, 1, 1)
        message = comparison.failure(comparison.compare(a, b), 255.0, 45.5)
        assert message.startswith(
            "Image 3 of 3, the worst of 2 that fail, is outside the limits (min_psnr 45.5 dB): max error 25.50"
        )
        assert "set max_error to 255 and min_psnr to 0: then nothing fails" in message

    def test_a_limit_that_is_met_is_reported(self, comparison: Any) -> None:
        found = comparison.compare(flat(0.5), flat(0.5 + LEVEL))
        assert "Within the limits: max_error 2 of 255, min_psnr 40 dB." in comparison.report(found, 2.0, 40.0)
        assert "limits" not in comparison.report(found, **OFF)


@pytest.mark.parametrize(
    ("a", "b", "expected", "remedy"),
    [
        ((1, 8, 9, 3), (1, 8, 10, 3), ("1 image of 9x8", "1 image of 10x8"), "Upscale Image"),
        ((2, 8, 9, 3), (1, 8, 9, 3), ("2 images of 9x8", "1 image of 9x8"), "Get Image from Batch"),
        ((1, 8, 9, 4), (1, 8, 9, 3), ("with 4 channels", "with 3 channels"), "Split Image with Alpha"),
    ],
)
def test_different_shapes_are_named_with_the_remedy(
    comparison: Any, a: tuple[int, ...], b: tuple[int, ...], expected: tuple[str, str], remedy: str
) -> None:
    with pytest.raises(ValueError, match=r"cannot be compared: image_a is .*, image_b is ") as caught:
        comparison.compare(torch.zeros(a), torch.zeros(b))
    message = str(caught.value)
    assert message.index(expected[0]) < message.index(expected[1])
    remedies = ("Upscale Image", "Get Image from Batch", "Split Image with Alpha")
    assert [name for name in remedies if name in message] == [remedy]


def test_an_empty_batch_is_refused(comparison: Any) -> None:
    with pytest.raises(ValueError, match="nothing to compare: image_a is 0 images of 9x8"):
        comparison.compare(torch.zeros(0, 8, 9, 3), torch.zeros(0, 8, 9, 3))
