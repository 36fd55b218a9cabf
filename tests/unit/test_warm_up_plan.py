"""Parsing of the Warm Up node's lists, and its result table."""

from __future__ import annotations

import pytest

from compile_cache.errors import UserError
from compile_cache.sizes import PRESETS, Size
from compile_cache.warm_up_plan import FAILED, READY, WARMED, Item, Outcome, plan, table


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("512x512", [(512, 512)]),
        ("64x128, 720x960,512x2048", [(512, 2048), (720, 960), (64, 128)]),
        (" 64 x 64 \n 72X80;", [(72, 80), (64, 64)]),
        ("SD1.5 512x768", [(512, 768)]),
        ("SD1.5, 512x512", [(512, 768), (768, 512), (512, 512)]),
    ],
)
def test_sizes_are_read_and_the_largest_comes_first(text: str, expected: list[tuple[int, int]]) -> None:
    assert [item.size for item in plan(text, "1", "1")] == [Size(*each) for each in expected]


def test_a_family_stands_for_all_of_its_presets() -> None:
    assert len(plan("SDXL", "1", "1")) == sum(name.startswith("SDXL ") for name in PRESETS) > 5


def test_every_combination_is_an_item_and_work_decides_the_order() -> None:
    items = plan("64x64, 128x128", "4, 1", "1, 2")
    assert items[0] == Item(Size(128, 128), 4, 2)
    assert items[-1] == Item(Size(64, 64), 1, 1)
    assert len(items) == len(set(items)) == 8
    assert [item.work for item in items] == sorted((item.work for item in items), reverse=True)


def test_connected_texts_decide_the_number_of_chunks() -> None:
    assert [item.chunks for item in plan("64x64", "1", None)] == [None]


@pytest.mark.parametrize(
    ("sizes", "batches", "chunks", "message"),
    [
        ("", "1", "1", "sizes is empty. For example: 1024x1024."),
        ("large", "1", "1", "sizes: 'large' is not a size. Write width x height"),
        (
            "100x100",
            "1",
            "1",
            "sizes: Size 100x100: width and height must be multiples of 8 between 64 and 8192. "
            "The nearest valid size is 104x104.",
        ),
        (
            "64x16384",
            "1",
            "1",
            "sizes: Size 64x16384: width and height must be multiples of 8 between 64 and 8192. "
            "The nearest valid size is 64x8192.",
        ),
        ("64x64", "0", "1", "batch_sizes: '0' is not a whole number from 1 to 64"),
        ("64x64", "two", "1", "batch_sizes: 'two' is not a whole number"),
        ("64x64", "1", "-1", "prompt_chunks: '-1' is not a whole number from 1 to 32"),
        ("64x64", "1", "", "prompt_chunks is empty"),
        (
            ", ".join(f"{8 * n}x64" for n in range(8, 24)),
            "1,2,3,4,5",
            "1,2,3,4",
            "320 shapes are too many; the limit is 256. Write fewer",
        ),
    ],
)
def test_an_invalid_list_is_refused_with_its_remedy(sizes: str, batches: str, chunks: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        plan(sizes, batches, chunks)
    assert str(caught.value).startswith(message)


def test_the_table_has_a_line_per_item_and_a_summary() -> None:
    outcomes = [
        Outcome("1024x1024", "model", WARMED, 1.5, 3 << 20, "1 captured"),
        Outcome("64x64", "model", READY),
        Outcome("64x64", "VAE", FAILED, 0.25, 0, "RuntimeError: no"),
    ]
    lines = table(outcomes).splitlines()
    assert lines[1].split() == ["1024x1024", "model", "warmed", "1.50", "3.0", "1", "captured"]
    assert lines[3].endswith("RuntimeError: no")
    assert lines[-1] == "1 ready, 1 warmed, 1 failed; 1.8 s"
