"""The training images of the demo's model, and its captions."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks import pictures
from scripts.models.demo_model import captions

RED, WHITE = (0.88, 0.15, 0.16), (0.94, 0.94, 0.92)


def a_scene(size: str, shape: str, position: str, background: str = "white") -> pictures.Scene:
    return pictures.Scene(((size, "red", shape, position),), background, ((0.0, 0.0, 0.0),))


def red_pixels(scene: pictures.Scene, width: int = 128, height: int = 96) -> torch.Tensor:
    """Mask (height, width) of the pixels that are nearer to the object's colour than to the background's."""
    picture = pictures.draw([scene], width, height)[0]
    red, white = (torch.tensor(colour).view(3, 1, 1) for colour in (RED, WHITE))
    return (picture - red).norm(dim=0) < (picture - white).norm(dim=0)


def test_a_seed_determines_the_images() -> None:
    first, again, other = (pictures.draw(pictures.scenes(seed, 6, 2), 64, 48) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.shape == (6, 3, 48, 64)
    assert 0 <= first.min() < first.max() <= 1


def test_an_image_does_not_depend_on_its_batch() -> None:
    scenes = pictures.scenes(3, 5, 1)
    together = pictures.draw(scenes, 72, 64)
    alone = torch.cat([pictures.draw([scene], 72, 64) for scene in scenes])
    assert torch.allclose(together, alone, atol=1e-6)


@pytest.mark.parametrize(
    ("position", "x", "y"),
    [("left", 32, 48), ("right", 96, 48), ("top", 64, 24), ("bottom", 64, 72), ("centre", 64, 48)],
)
def test_an_object_is_where_its_caption_says(position: str, x: int, y: int) -> None:
    rows, columns = torch.nonzero(red_pixels(a_scene("small", "circle", position)), as_tuple=True)
    assert abs(float(columns.float().mean()) + 0.5 - x) < 0.6
    assert abs(float(rows.float().mean()) + 0.5 - y) < 0.6


def test_a_large_object_is_larger_than_a_small_one() -> None:
    small, large = (red_pixels(a_scene(size, "circle", "centre")).sum() for size in captions.SIZES)
    assert float(large / small) == pytest.approx((0.20 / 0.12) ** 2, rel=0.1)


def test_the_shapes_are_distinguishable() -> None:
    masks = {shape: red_pixels(a_scene("large", shape, "centre")) for shape in captions.SHAPES}
    for one in masks:
        for other in masks:
            if one != other:
                overlap = (masks[one] & masks[other]).sum() / (masks[one] | masks[other]).sum()
                assert overlap < 0.9, (one, other)
    centre = (48, 64)
    assert not masks["ring"][centre]
    assert masks["circle"][centre]


def test_two_objects_are_opposite_each_other() -> None:
    opposite = {"left": "right", "right": "left", "top": "bottom", "bottom": "top"}
    for scene in pictures.scenes(4, 50, 2):
        first, second = (thing[3] for thing in scene.objects)
        assert opposite[first] == second


def test_jitter_moves_an_object_but_not_its_background() -> None:
    still = a_scene("small", "square", "left")
    moved = replace(still, jitter=((1.0, 0.0, 0.0),))
    one, other = (pictures.draw([scene], 128, 96)[0] for scene in (still, moved))
    assert not torch.equal(one, other)
    assert torch.equal(one[:, :, 64:], other[:, :, 64:])


@pytest.mark.parametrize("objects", [1, 2])
def test_the_numbers_of_a_batch_are_those_of_its_captions(objects: int) -> None:
    scenes = pictures.scenes(5, 40, objects)
    expected = torch.tensor([captions.numbers(scene.caption) for scene in scenes])
    assert torch.equal(pictures.caption_numbers(scenes), expected)
    assert expected.shape == (40, objects + 1, 4)


def test_words_may_be_in_any_order_and_may_be_left_out() -> None:
    assert captions.numbers("left circle RED large") == captions.numbers("large red circle left")
    assert captions.numbers("red circle")[0] == (0, captions.NUMBERS["red"], captions.NUMBERS["circle"], 0)
    assert captions.numbers("") == [captions.NOTHING] == captions.numbers(" , ")


def test_an_unknown_word_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"does not know 'lighthouse'\. It knows: small, large, red"):
        captions.numbers("red lighthouse")
    with pytest.raises(ValueError, match=r"'red' and 'blue' cannot both be in the phrase 'red circle blue'"):
        captions.numbers("red circle blue, white background")
