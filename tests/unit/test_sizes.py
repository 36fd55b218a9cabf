"""Sizes: presets are valid, an invalid size is refused with a remedy, and nothing is rounded silently."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compile_cache import sizes
from compile_cache.sizes import CUSTOM, MAXIMUM, MINIMUM, MULTIPLES, PRESETS, Size

sides = st.integers(-100, 20_000)
steps = st.sampled_from([int(multiple) for multiple in MULTIPLES])


@pytest.mark.parametrize(
    ("text", "size"),
    [("960x720", Size(960, 720)), (" 64 x 128 ", Size(64, 128)), ("8X16", Size(8, 16))],
)
def test_a_size_is_read_as_people_write_it(text: str, size: Size) -> None:
    assert sizes.parse_size(text) == size


@pytest.mark.parametrize("text", ["", "960", "960x", "a x b", "960x720x3", "-8x8"])
def test_a_text_that_is_not_a_size_is_refused_and_quoted(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size") as error:
        sizes.parse_size(text)
    assert repr(text) in str(error.value)


@pytest.mark.parametrize("preset", PRESETS[1:])
def test_every_preset_is_valid_and_replaces_width_and_height(preset: str) -> None:
    size = sizes.resolve_size(preset, 1, 1, 8)
    assert sizes.is_valid(size, 8)
    assert preset.endswith(str(size))


@pytest.mark.parametrize("preset", [CUSTOM, "SDXL 3x3", ""])
def test_an_unknown_preset_lists_the_choices(preset: str) -> None:
    with pytest.raises(ValueError, match="SDXL 1024x1024"):
        sizes.preset_size(preset)


def test_a_size_off_the_grid_names_the_size_the_multiple_and_the_nearest_size() -> None:
    with pytest.raises(ValueError) as error:
        sizes.resolve_size(CUSTOM, 1001, 700, "8")
    text = str(error.value)
    assert "1001x700" in text
    assert "multiples of 8" in text
    assert "1000x704" in text


def test_a_size_that_a_smaller_multiple_allows_names_that_multiple() -> None:
    with pytest.raises(ValueError, match=r"960x704; or set multiple to 16"):
        sizes.resolve_size("960x720", 0, 0, "64")


@pytest.mark.parametrize("side", [56, MAXIMUM + 8])
def test_a_side_out_of_range_is_refused(side: int) -> None:
    nearest = min(max(side, MINIMUM), MAXIMUM)
    with pytest.raises(ValueError, match=f"nearest valid size is 512x{nearest}"):
        sizes.resolve_size(CUSTOM, 512, side, "8")


@pytest.mark.parametrize("multiple", [0, 7, "12", "", "8.0"])
def test_an_unknown_multiple_lists_the_choices(multiple: int | str) -> None:
    with pytest.raises(ValueError, match="8, 16, 32, 64"):
        sizes.resolve_size(CUSTOM, 512, 512, multiple)


@given(sides, sides, steps)
def test_the_nearest_size_is_valid_and_no_other_is_nearer(width: int, height: int, multiple: int) -> None:
    nearest = sizes.nearest_valid(Size(width, height), multiple)
    assert sizes.is_valid(nearest, multiple)
    for wanted, side in ((width, nearest.width), (height, nearest.height)):
        inside = min(max(wanted, MINIMUM), MAXIMUM)
        assert abs(inside - side) * 2 <= multiple


@given(sides, sides, steps)
def test_a_size_is_returned_unchanged_or_refused(width: int, height: int, multiple: int) -> None:
    wanted = Size(width, height)
    if sizes.is_valid(wanted, multiple):
        assert sizes.resolve_size(CUSTOM, width, height, multiple) == wanted
    else:
        with pytest.raises(ValueError, match="nearest valid size"):
            sizes.resolve_size(CUSTOM, width, height, multiple)


@given(sides, sides, steps)
def test_a_size_may_become_the_nearest_one_and_that_is_said(width: int, height: int, multiple: int) -> None:
    wanted = Size(width, height)
    found = sizes.resolve_size(CUSTOM, width, height, multiple, snaps=True)
    assert found == (wanted if sizes.is_valid(wanted, multiple) else sizes.nearest_valid(wanted, multiple))
    said = f"{found} instead of {wanted}: multiples of {multiple}" if found != wanted else str(wanted)
    assert sizes.explain_snap(wanted, found, multiple) == said


class TestNearestReady:
    READY = [
        Size(512, 512),
        Size(1024, 1024),
        Size(832, 1216),
        Size(64, 128),
        Size(980, 980),
    ]  # 980 is not a multiple of 8

    @pytest.mark.parametrize(
        ("wanted", "expected"),
        [
            ((1024, 1024), (1024, 1024)),
            ((968, 984), (1024, 1024)),
            ((600, 600), (512, 512)),
            ((720, 1056), (832, 1216)),
            ((1216, 832), None),
            ((1280, 720), None),
        ],
    )
    def test_the_aspect_stays_and_the_area_is_the_nearest(
        self, wanted: tuple[int, int], expected: tuple[int, int] | None
    ) -> None:
        found = sizes.nearest_ready(Size(*wanted), self.READY, "8")
        assert found == (None if expected is None else Size(*expected))

    def test_a_size_off_the_models_multiple_is_not_ready(self) -> None:
        assert sizes.nearest_ready(Size(720, 720), [Size(720, 720), Size(512, 512)], "16") == Size(720, 720)
        assert sizes.nearest_ready(Size(720, 720), [Size(720, 720), Size(512, 512)], "64") == Size(512, 512)

    def test_the_size_itself_comes_first(self) -> None:
        ready = [Size(1016, 1032), Size(1024, 1024), Size(1032, 1016)]
        assert sizes.nearest_ready(Size(1024, 1024), ready, "8") == Size(1024, 1024)
