"""GGUF weights: every format gives the numbers that ggml's own decoder gives, also in a trace; what is corrupt has a
reason.
"""

from __future__ import annotations

import base64
import enum
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from compile_cache.modules.gguf_types import FORMATS, decoded
from compile_cache.modules.gguf_weights import is_gguf, is_gguf_class, patches_of
from compile_cache.modules.region_weights import (
    weight_forms,
    weight_inputs,
    weight_layouts,
    weight_slots,
    weights_from_inputs,
)
from compile_cache.modules.weight_parts import form_of, parts_of, why_unreadable

# One block of each format, and its numbers (float32) by `gguf.quants.dequantize` of the package gguf 0.19.0.
BLOCKS = json.loads((Path(__file__).parent / "gguf_blocks.json").read_text("utf-8"))

Kind = enum.Enum("Kind", ["F32", "IQ1_S", *FORMATS])


class Bytes(torch.Tensor):
    """As ComfyUI-GGUF's: it says the shape of its numbers."""

    @property
    def shape(self) -> Any:
        if "tensor_shape" not in vars(self):
            self.tensor_shape = self.size()
        return self.tensor_shape

    def detach(self) -> Any:
        return self


def block(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The bytes and the numbers of a block."""
    data = torch.frombuffer(bytearray.fromhex(BLOCKS[name]["bytes"]), dtype=torch.uint8)
    numbers = torch.frombuffer(bytearray(base64.b64decode(BLOCKS[name]["numbers"])), dtype=torch.float32)
    return data, numbers


def weight(name: str, data: torch.Tensor, *shape: int) -> Any:
    made: Any = data.as_subclass(Bytes)
    made.tensor_type, made.tensor_shape, made.patches = Kind[name], torch.Size(shape), []
    return made


def layer(name: str) -> tuple[torch.nn.Linear, torch.Tensor]:
    """A Linear whose weight is three equal rows in a format, and its numbers."""
    data, numbers = block(name)
    linear = torch.nn.Linear(len(numbers), 3, bias=False)
    linear.weight = torch.nn.Parameter(weight(name, data.repeat(3, 1), 3, len(numbers)), requires_grad=False)
    return linear, numbers.repeat(3, 1)


def test_the_file_has_every_format() -> None:
    assert BLOCKS.keys() == FORMATS.keys()


@pytest.mark.parametrize("name", FORMATS)
def test_a_block_has_the_numbers_of_the_packages_decoder(name: str) -> None:
    data, numbers = block(name)
    assert torch.equal(decoded(name, data, numbers.shape), numbers)
    assert numbers.unique().numel() > 4


@pytest.mark.parametrize("name", FORMATS)
def test_a_region_takes_the_bytes_and_a_trace_has_the_numbers(name: str) -> None:
    linear, numbers = layer(name)
    slots = weight_slots(linear)
    (data,) = weight_inputs(slots)
    assert type(data) is torch.Tensor
    assert data.data_ptr() == linear.weight.data_ptr()
    assert weight_layouts(slots) == [f"GGUF {name}"]
    assert repr(name) in weight_forms(slots)[0][1]

    def run(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        with weights_from_inputs(linear, (), weights):
            return torch.nn.functional.linear(x, linear.weight)

    x = torch.randn(2, numbers.shape[1])
    graph = make_fx(run, tracing_mode="fake")(x, data)
    assert torch.equal(graph(x, data), torch.nn.functional.linear(x, numbers))
    other = data.flip(0) if name == "BF16" else data
    assert graph(x, other).shape == (2, 3)


def test_the_shape_and_the_format_are_part_of_the_form() -> None:
    data, _ = block("Q8_0")
    forms = [
        form_of(weight("Q8_0", data.repeat(4, 1), 4, 32)),
        form_of(weight("Q8_0", data.repeat(4, 1), 2, 64)),
        form_of(weight("F32", data.view(torch.uint8).repeat(4, 1), 4, 34)),
    ]
    assert len({form.text for form in forms if form is not None}) == 3
    equal = form_of(weight("Q8_0", data.repeat(4, 1), 4, 32))
    assert equal is not None
    assert forms[0] is not None
    assert equal.text == forms[0].text


def test_a_tensor_that_is_no_block_format_is_itself() -> None:
    plain = torch.arange(6.0).reshape(2, 3)
    (part,) = parts_of(weight("F32", plain, 2, 3))
    assert type(part) is torch.Tensor
    assert torch.equal(part, plain)


def test_a_tensor_without_a_format_is_known_by_its_class_alone() -> None:
    bare = torch.zeros(3).as_subclass(Bytes)  # what the loader makes of a 1D tensor in bf16
    assert is_gguf(bare)
    assert len(parts_of(bare)) == 1
    assert is_gguf_class(Bytes)
    assert not is_gguf_class(torch.nn.Parameter)
    assert not is_gguf(torch.zeros(3))


def test_patches_count_at_any_time() -> None:
    data, _ = block("Q8_0")
    held = weight("Q8_0", data, 1, 32)
    assert not patches_of(held)
    held.patches = [([], "key")]
    assert patches_of(held) == held.patches


@pytest.mark.parametrize(
    ("name", "size", "reason"),
    [
        ("IQ1_S", 50, "GGUF format IQ1_S, which Resolute cannot decode"),
        ("Q8_0", 33, "33 bytes in the GGUF format Q8_0"),
    ],
)
def test_what_cannot_be_decoded_has_a_reason_and_no_form(name: str, size: int, reason: str) -> None:
    corrupt = weight(name, torch.zeros(size, dtype=torch.uint8), 1, 32)
    assert form_of(corrupt) is None
    assert reason in why_unreadable(corrupt)
