"""What entries of ComfyUI's `transformer_options` mean for a graph, and how many pixels a cell of a latent has."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

Pack = Callable[[str], Any]


@pytest.fixture
def table(pack: Pack) -> Any:
    return pack("nodes.adapters.comfyui.transformer_options")


def test_a_value_of_a_key_is_no_part_of_what_may_be_ignored(table: Any) -> None:
    """A graph has no key for it, so a whole call with one is not captured."""
    keyed = table.names_of(table.Meaning.KEYED)
    assert keyed.isdisjoint(table.names_of(table.Meaning.INERT | table.Meaning.PASSED_ON))
    assert table.unknown_in(dict.fromkeys(keyed, 1)) == sorted(keyed)


def test_attention_of_another_node_is_in_no_graph(table: Any) -> None:
    assert table.unknown_in({table.OVERRIDE: None, table.PATCHES: {}, table.SIGMAS: None}) == [table.OVERRIDE]


def test_patches_of_attention_are_those_at_the_place_of_the_block(table: Any) -> None:
    place = {table.BLOCK: ("input", 4), table.BLOCK_INDEX: 1}
    for there, found in {
        ("input", 4): True,
        ("input", 4, 1): True,
        ("input", 5): False,
        ("input", 4, 0): False,
    }.items():
        options = {table.REPLACEMENTS: {"attn2": {there: print}}, **place}
        assert table.patches_of_attention(options) == (["attn2"] if found else [])
    patches = {"attn1_patch": [print], "emb_patch": [print]}
    assert table.patches_of_attention({table.PATCHES: patches}) == ["attn1_patch"]


def test_a_model_of_an_old_version_and_an_odd_vae_have_the_default_cell(pack: Pack) -> None:
    cells = pack("nodes.adapters.comfyui.latent_cells")
    assert [cells.of_format(each) for each in (None, object())] == [cells.DEFAULT] * 2
    assert cells.of_format(SimpleNamespace(spacial_downscale_ratio=32)) == 32
    ratios = {8: 8, 16: 16, (lambda: 0, 16, 32): 32, (lambda: 0, 8, lambda: 0): cells.DEFAULT}
    assert {ratio: cells.of_vae(SimpleNamespace(upscale_ratio=ratio)) for ratio in ratios} == ratios
