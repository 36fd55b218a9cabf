"""The arguments of a recognised block: what is a tensor, a symbol or a constant, and what it reads of the options."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable
from dataclasses import make_dataclass
from types import ModuleType
from typing import Any

import pytest
import torch

from ...odd_values import ODD, X


@pytest.fixture
def arguments(adapter: Callable[[str], ModuleType]) -> ModuleType:
    return adapter("blocks.transformers.arguments")


@pytest.fixture
def options(adapter: Callable[[str], ModuleType], comfy: None) -> ModuleType:
    return adapter("blocks.transformers.options")


class TestArguments:
    def test_what_is_taken_apart_can_be_put_together(self, arguments: ModuleType) -> None:
        modulation = make_dataclass("Modulation", ["shift", "gate"])
        modulation.__module__ = "comfy.ldm.flux.layers"
        given = {
            "x": X, "mask": None, "pe": (X, [X, {"a": X}]), "heads": 8, "flag": True, "scale": 0.5,
            "size": X.shape, "vec": modulation(X, None), "dtype": torch.float16,
        }  # fmt: skip
        apart = arguments.flatten(given)
        assert len(apart.tensors) == 5
        assert apart.names == ["x", "pe", "pe", "pe", "vec"]
        assert apart.numbers == [8, 2, 5, 16]
        again = arguments.rebuild(apart.layout, apart.inputs())
        assert again["vec"].shift is X
        assert {**again, "vec": None} == {**given, "vec": None}

    def test_calls_differ_by_constants_and_not_by_tensors_or_numbers_above_one(self, arguments: ModuleType) -> None:
        def layout(**given: Any) -> Any:
            return arguments.flatten({"x": X, **given}).layout

        assert layout(index=24) == layout(index=37)
        assert layout(mask=X) == layout(mask=X[:1])
        for one, other in [(1, True), (1, 1.0), (0, 1), (None, 0), ([24], [24, 37]), ((), []), (1, 2)]:
            assert layout(value=one) != layout(value=other)

    @pytest.mark.parametrize("name", ["value", "items", "tensor", "number", "dict"])
    def test_an_argument_may_have_any_name(self, arguments: ModuleType, name: str) -> None:
        apart = arguments.flatten({"x": X, name: X, "others": {name: [X, 5]}})
        assert len(apart.tensors) == 3
        again = arguments.rebuild(apart.layout, apart.inputs())
        assert (again[name] is X, again["others"][name][1]) == (True, 5)

    def test_a_slice_is_taken_apart_and_its_ends_are_numbers(self, arguments: ModuleType) -> None:
        apart = arguments.flatten({"x": X, "text": slice(0, 7), "rest": [slice(7, None)]})
        assert apart.numbers == [7, 7]
        hash(apart.layout)  # that of a slice itself fails before Python 3.12
        again = arguments.rebuild(apart.layout, apart.inputs())
        assert (again["text"], again["rest"]) == (slice(0, 7), [slice(7, None)])
        other = arguments.flatten({"x": X, "text": slice(0, 9), "rest": [slice(9, None)]})
        assert other.layout == apart.layout
        assert arguments.flatten({"x": X, "text": slice(1, 7), "rest": [slice(7, None)]}).layout != apart.layout

    def test_an_object_that_this_comfyui_makes_otherwise_is_no_argument(self, arguments: ModuleType) -> None:
        class Newer:
            def __init__(self, tensor: torch.Tensor, patches_per_frame: int, per_frame: bool = False) -> None:
                self.data, self.patches_per_frame = tensor, patches_per_frame

        class Older:
            def __init__(self, tensor: torch.Tensor, patches_per_frame: int) -> None:
                self.data, self.patches_per_frame = tensor, patches_per_frame

        for kind in (Newer, Older):
            kind.__module__, kind.__name__ = "comfy.ldm.lightricks.av_model", "CompressedTimestep"
            kind.__qualname__ = kind.__name__
        apart = arguments.flatten({"x": X, "timestep": Newer(X, 1)})
        assert arguments.rebuild(apart.layout, apart.inputs())["timestep"].data is X
        with pytest.raises(arguments.UnusableArgumentError, match="holds a CompressedTimestep"):
            arguments.flatten({"x": X, "timestep": Older(X, 1)})

    def test_another_packs_object_is_no_argument_of_a_region(self, arguments: ModuleType) -> None:
        with pytest.raises(arguments.UnusableArgumentError, match=r"'cache\[0\]' holds a SimpleNamespace"):
            arguments.flatten({"x": X, "cache": [types.SimpleNamespace()]})

    @pytest.mark.parametrize(
        ("batch", "table", "shared", "expected"),
        [
            (2, 2, (), ("b0", "b1")),
            (2, 1, (1,), ("b0", None)),  # a table that all pictures share
            (2, 1, (), ("b0", "b1")),  # one of which the block takes a row for each picture too
            (1, 1, (), ("b0", "b1")),  # a batch of one, traced as two
            (1, 1, (1,), ("b0", None)),
        ],
    )
    def test_a_first_dimension_of_one_is_a_batch_unless_all_share_it(
        self, arguments: ModuleType, batch: int, table: int, shared: Any, expected: Any
    ) -> None:
        apart = arguments.flatten({"x": torch.ones(batch, 5, 16), "pe": torch.ones(table, 1, 5, 4)})
        dims = arguments.dims_of(apart, frozenset(shared))
        assert tuple(names[0] for names in dims) == expected
        assert dims[1][1:] == (None, "1.2", "1.3")
        assert arguments.shared_by_batch(apart) == (frozenset({1}) if batch > table else frozenset())


class TestOptions:
    def read(self, options: ModuleType, given: Any, block: Callable[[Any], Any]) -> Any:
        reads: Any = {}
        block(options.BlockOptions("Block", reads, given))
        return reads

    def test_what_a_block_looks_up_is_noted(self, options: ModuleType) -> None:
        given = {"run_vx": False, "patches": {"post_input": [1]}, "block_index": 3, "sigmas": X, "unknown": 1}
        reads = self.read(
            options,
            given,
            lambda o: (
                o.get("run_vx", True),
                "attn1_patch" in o.get("patches", {}),
                o.copy()["block_index"],
                o.get("a"),
            ),
        )
        assert set(reads) == {("run_vx",), ("patches",), ("patches", "attn1_patch"), ("block_index",), ("a",)}
        assert options.fits(given, reads)
        assert options.fits({**given, "block_index": 9, "sigmas": None, "unknown": 2}, reads)
        for change in [{"run_vx": True}, {"patches": {"attn1_patch": [1]}}, {"a": 1}, {"block_index": None}]:
            assert not options.fits({**given, **change}, reads), change

    def test_the_traced_block_sees_what_was_noted_and_nothing_else(self, options: ModuleType) -> None:
        reads = self.read(
            options, {"run_vx": False}, lambda o: (o.get("run_vx"), o.get("optimized_attention_override"))
        )
        seen = options.BlockOptions("Block", reads)
        assert seen["run_vx"] is False
        assert callable(seen["optimized_attention_override"])
        with pytest.raises(options.RefusedOptionError, match="reads 'run_ax'"):
            seen.get("run_ax")

    @pytest.mark.parametrize(
        ("given", "block", "reason"),
        [
            ({"unknown": 1}, lambda o: o.get("unknown"), "Block reads 'unknown' of transformer_options"),
            ({"block_index": 3}, lambda o: o["block_index"] == 3, "Block uses 'block_index'"),
            ({"block_index": 3}, lambda o: isinstance(o["block_index"], int), "Block uses 'block_index'"),
            ({"sigmas": X}, lambda o: o["sigmas"][0], "Block uses 'sigmas'"),
            ({}, lambda o: o.update(a=1), "as a whole"),
            ({}, lambda o: {**o}, "as a whole"),
            ({}, lambda o: o.__setitem__("state", 1), "Block writes 'state'"),
            (
                {"patches": {"attn1_patch": [1]}},
                lambda o: o["patches"].get("attn1_patch"),
                "patches attn1_patch inside",
            ),
            ({"patches_replace": {"attn1": {0: 1}}}, lambda o: o["patches_replace"]["attn1"], "patches attn1 inside"),
            ({"optimized_attention_override": 1}, lambda o: "optimized_attention_override" in o, "overrides attention"),
        ],
    )
    def test_what_no_region_may_depend_on_is_refused_by_name(
        self, options: ModuleType, given: Any, block: Callable[[Any], Any], reason: str
    ) -> None:
        with pytest.raises(options.RefusedOptionError, match=reason):
            self.read(options, given, block)

    def test_a_block_may_write_into_a_copy_of_its_own(self, options: ModuleType) -> None:
        def block(given: Any) -> None:
            extra = given.copy()
            extra["img_slice"] = [7, 31]
            assert extra["img_slice"] == [7, 31]
            assert "img_slice" not in given

        assert set(self.read(options, {}, block)) == {("img_slice",)}


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("place", [lambda value: value, lambda value: [{"a": (value,)}]], ids=["itself", "inside"])
def test_whatever_a_block_gets_is_taken_apart_or_refused(arguments: ModuleType, name: str, place: Any) -> None:
    given = {"x": X, "value": place(ODD[name])}
    try:
        apart = arguments.flatten(given)
    except arguments.UnusableArgumentError as error:
        assert "'value" in str(error)
    else:
        assert hash(apart.layout) == hash(arguments.flatten(given).layout)
        assert arguments.rebuild(apart.layout, apart.inputs())["x"] is X


@pytest.mark.parametrize("name", ODD)
def test_whatever_the_options_hold_a_block_is_told_or_refused(
    options: ModuleType, adapter: Callable[[str], ModuleType], name: str
) -> None:
    known = adapter("comfyui.transformer_options")
    for key in (*known.MEANINGS, "unknown"):
        given, reads = {key: ODD[name]}, {}
        for path in ((key,), (key, "attn1_patch")):
            seen = reads[path] = options.classify(given, path)
            hash(seen)
        assert options.fits(given, {path: seen for path, seen in reads.items() if seen[0] != "value"})
        with contextlib.suppress(options.RefusedOptionError):
            options.BlockOptions("Block", {}, given).get(key)
    assert options.classify({"unknown": ODD[name]}, ("unknown",)) == options._REFUSED


def test_a_block_may_tell_one_from_true(options: ModuleType) -> None:
    seen = [options.classify({"run_vx": value}, ("run_vx",)) for value in (1, True, 0, False)]
    assert len(set(map(repr, seen))) == 4
    assert not options.fits({"run_vx": 1}, {("run_vx",): seen[1]})


def test_zeros_of_other_signs_are_other_layouts(arguments: ModuleType) -> None:
    first, second = (arguments.flatten({"x": X, "scale": zero}).layout for zero in (0.0, -0.0))
    assert first != second
