"""Which measured shape answers for another one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from compile_cache.attention.shape import Choice, Shape, nearest

CHOICE = Choice({"flash": 0.335, "cudnn": 0.185}, chosen="cudnn")


def shape(queries: int = 4096, keys: int | None = None, **kwargs: Any) -> Shape:
    made = {"dtype": "torch.float16", "v_width": 64, "switches": (True, True, True, True, False), **kwargs}
    return Shape(q=(2, 10, queries, 64), k=(2, 10, queries if keys is None else keys, 64), **made)


def test_the_nearest_measured_shape_of_the_same_kind_is_a_neighbour() -> None:
    other = Choice({"flash": 0.02}, chosen="flash")
    unmeasured = Choice(chosen="flash", like=(1024, 1024))
    entries = [(shape(1024), CHOICE), (shape(3000), other), (shape(1500), unmeasured)]
    assert nearest(shape(2000), entries) == (shape(3000), other)
    assert nearest(shape(1500), entries) == (shape(1024), CHOICE)
    assert nearest(shape(512), entries) == (shape(1024), CHOICE)
    for far in (shape(511), shape(6001), shape(1024, 77), shape(1024, dtype="torch.bfloat16"), shape(1024, v_width=32)):
        assert nearest(far, entries) is None, far
    assert nearest(shape(1024, switches=(True, True, False, True, False)), entries) is None


@pytest.mark.parametrize(("batch", "is_near"), [(1, True), (4, True), (5, False)])
def test_a_neighbour_has_at_most_twice_or_half_the_batch(batch: int, is_near: bool) -> None:
    asked = replace(shape(1024), q=(batch, 10, 1024, 64), k=(batch, 10, 1024, 64))
    assert (nearest(asked, [(shape(1024), CHOICE)]) is not None) is is_near


def test_a_mask_of_another_kind_is_no_neighbour() -> None:
    of_keys = {"mask": (2, 1, 1, 1024), "mask_dtype": "torch.bool"}
    entries = [(shape(1024, **of_keys), CHOICE)]
    near: Callable[..., object] = lambda **changes: nearest(shape(1500, **{**of_keys, **changes}), entries)  # noqa: E731
    assert near(mask=(2, 1, 1, 1500)) is not None
    for other in ({"mask": (2, 1, 1500, 1500)}, {"mask": (1, 1, 1, 1500)}, {"mask_dtype": "torch.float16"}):
        assert near(**other) is None, other
    assert nearest(shape(1500), entries) is None
