"""Keys: everything that changes a computation changes the key, nothing else does, in every process."""

from __future__ import annotations

import itertools
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compile_cache.keys import (
    CaptureKey,
    GraphKey,
    Role,
    Signature,
    TensorSpec,
    Tier,
    differing,
    digest,
    repr_digest,
)

from ..programs import run_python

BASE: dict[str, Any] = {
    "shape": (2, 4, 64, 64),
    "dtype": "float16",
    "device": "cuda",
    "memory_format": "contiguous",
    "tensor name": "latent",
    "value": 1,
    "value name": "scale",
    "role": Role.UNET,
    "model": "a" * 64,
    "backend": "inductor",
    "options": (("mode", "fast"),),
}
OTHER: list[tuple[str, Any]] = [
    ("shape", (2, 4, 64, 72)),
    ("shape", (1, 4, 64, 64)),
    ("shape", (2, 4, 64, 64, 1)),
    ("shape", (2, 4, 4096)),
    ("dtype", "bfloat16"),
    ("device", "cpu"),
    ("memory_format", "channels_last"),
    ("tensor name", "context"),
    ("value", 2),
    ("value", None),
    ("value", "1"),
    ("value", (1,)),
    ("value name", "strength"),
    ("role", Role.VAE_DECODE),
    ("model", "b" * 64),
    ("backend", "cudagraph"),
    ("options", (("mode", "slow"),)),
    ("options", (("depth", "fast"),)),
    ("options", ()),
]
IN_PROCESS: dict[str, Any] = {"device": "cuda:0", "owner": 1, "epoch": 1, "torch_flags": ()}
IN_PROCESS_OTHER: list[tuple[str, Any]] = [
    ("device", "cuda:1"),
    ("owner", 2),
    ("epoch", 2),
    ("torch_flags", (("fp16 accumulation", True),)),
]

# Values that are equal in Python but not in a traced graph, and similar ones.
PLAIN_VALUES = [None, False, True, 0, 1, 0.0, -0.0, 1.0, "", "0", "1", "True", "None", (), (0,), (1,), (True,), ((1,),)]


def graph_key(**changes: Any) -> GraphKey:
    c = {**BASE, **changes}
    spec = TensorSpec(c["shape"], c["dtype"], c["device"], c["memory_format"])
    signature = Signature(((c["tensor name"], spec),), ((c["value name"], c["value"]),))
    return GraphKey(signature, c["role"], c["model"], c["backend"], c["options"])


def capture_key(graph: GraphKey | None = None, **changes: Any) -> CaptureKey:
    c = {**IN_PROCESS, **changes}
    return CaptureKey(graph or graph_key(), c["device"], c["owner"], c["epoch"], c["torch_flags"])


@pytest.mark.parametrize(("factor", "value"), OTHER)
def test_each_factor_changes_the_graph_key_and_its_digest(factor: str, value: Any) -> None:
    changed = graph_key(**{factor: value})
    assert changed != graph_key()
    assert capture_key(changed) != capture_key()
    assert changed.digest() != graph_key().digest()


@pytest.mark.parametrize(("factor", "value"), IN_PROCESS_OTHER)
def test_each_in_process_factor_changes_the_capture_key_and_not_the_graph_key(factor: str, value: Any) -> None:
    changed = capture_key(**{factor: value})
    assert changed != capture_key()
    assert changed.components() != capture_key().components()
    assert changed.graph.digest() == capture_key().graph.digest()


def test_the_tables_cover_every_field_of_the_keys() -> None:
    named = {factor for factor, _ in OTHER}
    assert {field.name for field in fields(TensorSpec)} <= named
    assert {field.name for field in fields(GraphKey) if field.init} - {"signature"} <= named
    in_process = {field.name for field in fields(CaptureKey)} - {"graph", "tier"}
    assert in_process == {factor for factor, _ in IN_PROCESS_OTHER}


def test_the_tier_changes_the_capture_key_and_nothing_that_people_see() -> None:
    original, compiled = (CaptureKey(graph_key(), "cuda:0", 1, 1, tier=tier) for tier in (Tier.ORIGINAL, Tier.COMPILED))
    assert original != compiled
    assert original.of_any_epoch != compiled.of_any_epoch
    assert original.components() == compiled.components()


@pytest.mark.parametrize(("a", "b"), list(itertools.combinations(PLAIN_VALUES, 2)))
def test_plain_values_of_another_type_or_sign_have_another_digest_and_capture(a: Any, b: Any) -> None:
    assert digest(a) != digest(b)
    assert repr_digest([a]) != repr_digest([b])
    assert graph_key(value=a).digest() != graph_key(value=b).digest()
    assert capture_key(graph_key(value=b)) not in {capture_key(graph_key(value=a)): "graph"}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_capture_is_found_under_nan_and_infinity(value: float) -> None:
    kept = {capture_key(graph_key(value=value)): "graph"}
    assert capture_key(graph_key(value=float(str(value)))) in kept


def test_the_order_of_inputs_is_part_of_the_key_because_a_capture_takes_them_in_order() -> None:
    spec = TensorSpec((1,), "float32", "cpu")
    forth, back = Signature((("a", spec), ("b", spec))), Signature((("b", spec), ("a", spec)))
    keys = [GraphKey(signature, Role.UNET, "m", "eager") for signature in (forth, back)]
    assert keys[0] != keys[1]
    assert keys[0].digest() != keys[1].digest()


literals = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=6,
)


@given(literals, literals)
def test_digests_are_equal_exactly_where_type_and_value_are(a: Any, b: Any) -> None:
    assert (digest(a) == digest(b)) == (repr(a) == repr(b))


@given(literals)
def test_nesting_and_concatenation_never_collide(a: Any) -> None:
    assert len({digest(a), digest((a,)), digest((a, a)), digest(((a,), a)), digest((a, (a,)))}) == 5


@pytest.mark.parametrize(
    "value", [[1], {"a": 1}, {1}, b"1", object(), 1j, (1, [2])], ids=lambda value: type(value).__name__
)
def test_values_that_are_not_plain_data_are_refused(value: Any) -> None:
    with pytest.raises(TypeError, match=r"cannot be part of a key"):
        digest(value)


DIGEST_IN_ANOTHER_PROCESS = """
from compile_cache.keys import GraphKey, Role, Signature, TensorSpec, digest
spec = TensorSpec((2, 4, 64, 64), "float16", "cuda")
signature = Signature((("latent", spec),), (("control", ("b", "a")), ("scale", 1.0), ("on", True), ("who", "\\u00e9")))
print(GraphKey(signature, Role.UNET, "m", "inductor", (("mode", None),)).digest())
print(len({digest(name) for name in ("a", "b", "c")}))
"""


def test_a_digest_is_the_same_in_every_process() -> None:
    outputs = {run_python(DIGEST_IN_ANOTHER_PROCESS, PYTHONHASHSEED=seed) for seed in ("0", "1", "4242")}
    assert len(outputs) == 1
    assert len(outputs.pop().split()[0]) == 64


def test_the_latent_shape_is_the_shape_of_the_first_tensor() -> None:
    latent, context = TensorSpec((2, 4, 8, 8), "float32", "cpu"), TensorSpec((2, 77, 768), "float32", "cpu")
    assert Signature((("latent", latent), ("context", context))).latent_shape == (2, 4, 8, 8)
    assert Signature(()).latent_shape == ()


def test_a_tensor_spec_prints_everything_that_a_graph_may_depend_on() -> None:
    assert str(TensorSpec((2, 4, 90, 45), "float16", "cuda")) == "2x4x90x45 float16 cuda"
    assert str(TensorSpec((2,), "float32", "cpu", "channels_last")) == "2 float32 cpu channels_last"


@pytest.mark.parametrize(("a", "b"), [(1, True), (1, 1.0), (0, False), (0.0, -0.0)])
def test_values_of_different_type_count_as_a_difference(a: Any, b: Any) -> None:
    assert [name for name, *_ in differing([("scale", a)], [("scale", b)])] == ["scale"]
