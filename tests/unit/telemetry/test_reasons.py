"""The sentence that explains a cache miss, and the known signatures it is compared with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from compile_cache.keys import CaptureKey, GraphKey, Role, Signature, TensorSpec
from compile_cache.telemetry.reasons import FIRST, FREED, SeenSignatures, explain_miss


def key(latent: tuple[int, ...] = (2, 4, 64, 64), tokens: int = 77, epoch: int = 1, **changes: Any) -> CaptureKey:
    tensors = (
        ("latent", TensorSpec(latent, "float16", "cuda")),
        ("context", TensorSpec((2, tokens, 768), "float16", "cuda")),
    )
    graph = GraphKey(Signature(tensors, changes.pop("values", ())), Role.UNET, "m", "inductor")
    return replace(CaptureKey(graph, "cuda:0", 1, epoch), **changes)


def explain(wanted: CaptureKey, *known: CaptureKey) -> str:
    return explain_miss(wanted.components(), [other.components() for other in known])


def test_the_first_graph_says_so() -> None:
    assert explain(key()) == FIRST


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        (key(latent=(2, 4, 90, 64)), "latent height 64 -> 90"),
        (key(latent=(2, 4, 90, 120)), "latent height 64 -> 90, latent width 64 -> 120"),
        (key(latent=(4, 4, 64, 64)), "latent batch 2 -> 4"),
        (key(tokens=154), "context tokens 77 -> 154"),
        (key(epoch=2), "weights moved or changed"),
        (key(tokens=154, epoch=2), "context tokens 77 -> 154, weights moved or changed"),
        (key(device="cuda:1"), "device cuda:0 -> cuda:1"),
        (key(owner=3), "module 1 -> 3"),
    ],
)
def test_a_miss_names_what_differs(wanted: CaptureKey, text: str) -> None:
    assert explain(wanted, key()) == text


def test_a_batch_that_differs_in_every_tensor_is_one_difference() -> None:
    merged, split = with_batch(2), with_batch(1)
    assert explain(split, merged) == "latent batch 2 -> 1"


def with_batch(batch: int) -> CaptureKey:
    shapes = {"latent": (batch, 4, 64, 64), "timesteps": (batch,), "context": (batch, 77, 768)}
    return with_tensors(shapes)


def with_tensors(shapes: dict[str, tuple[int, ...]], values: Any = ()) -> CaptureKey:
    tensors = tuple((name, TensorSpec(shape, "float16", "cuda")) for name, shape in shapes.items())
    return CaptureKey(GraphKey(Signature(tensors, values), Role.UNET, "m", "inductor"), "cuda:0", 1, 1)


def test_control_residuals_that_appear_are_one_difference() -> None:
    shapes: dict[str, tuple[int, ...]] = {"latent": (2, 4, 64, 64)}
    residuals = {f"control.output[{index}]": (2, 320, 64, 64) for index in range(9)}
    names = ("output",)
    controlled = with_tensors({**shapes, **residuals}, (("control", names), ("control.output", 9)))
    assert explain(controlled, with_tensors(shapes)) == "control added"
    assert explain(with_tensors(shapes), controlled) == "control gone"


def test_many_differences_are_counted_and_not_listed() -> None:
    text = explain(key(latent=(1, 8, 90, 120), tokens=154), key())
    assert text == "latent batch 2 -> 1, latent channels 4 -> 8, latent height 64 -> 90 and 2 more"


def test_a_miss_is_compared_with_the_nearest_graph() -> None:
    far, near = key(latent=(1, 4, 8, 8), tokens=231, epoch=9), key(tokens=154)
    for known in ((far, near), (near, far)):
        assert explain(key(), *known).startswith("context ")


def test_a_freed_graph_is_distinguished_from_a_new_one() -> None:
    assert explain(key(), key()) == FREED


@pytest.mark.parametrize("values", [(("y", None),), (("y", False),)])
def test_a_new_input_is_a_difference(values: Any) -> None:
    assert explain(key(values=values), key()).startswith("y ")


def test_long_values_are_shortened() -> None:
    many = tuple(range(100))
    assert len(explain(key(values=(("tiles", many),)), key(values=(("tiles", many[1:]),)))) < 150


def test_a_signature_is_new_only_once() -> None:
    book = SeenSignatures()
    assert book.add(1, "a", key().components()) == FIRST
    assert book.add(1, "a", key().components()) is None
    assert book.add(1, "b", key(tokens=154).components()) == "context tokens 77 -> 154"


def test_modules_are_distinguished_and_forgotten() -> None:
    book = SeenSignatures()
    book.add(1, "a", key().components())
    assert book.add(2, "a", key().components()) == FIRST
    book.forget(1)
    assert book.add(1, "a", key().components()) == FIRST


def test_old_signatures_are_forgotten_and_the_latest_are_kept() -> None:
    book = SeenSignatures()
    for number in range(1000):
        book.add(1, number, key(epoch=number).components())
    assert book.add(1, 999, key(epoch=999).components()) is None
    assert book.add(1, 0, key(epoch=0).components()) is not None
