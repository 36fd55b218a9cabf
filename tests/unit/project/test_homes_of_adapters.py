"""Each of these decisions has one home: a name, a table or a number that only one file of the pack writes."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from .test_architecture import ADAPTERS, SOURCES, name_of

SYNTAX = {name_of(source.file): source.nodes for source in SOURCES}


def load(name: str) -> ModuleType:
    """A file of nodes/adapters that imports nothing of ours, by its path below there."""
    spec = importlib.util.spec_from_file_location(f"alone_{Path(name).stem}", ADAPTERS / name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    del sys.modules[spec.name]  # no other test finds it
    return module


def written(words: Collection[str], kinds: Sequence[str] = ("attr", "value")) -> set[tuple[str, str]]:
    """Where one of these words is the name of an attribute or a text: (file, word)."""
    return {
        (name, word)
        for name, nodes in SYNTAX.items()
        for node in nodes
        for word in (getattr(node, kind, None) for kind in kinds)
        if isinstance(word, str) and word in words
    }


class TestTransformerOptions:
    HOME = "comfyui/transformer_options.py"
    OTHER_MEANINGS = (
        ("nodes/deepcache.py", "easycache"),  # people who look for that find this node too
        ("compile_cache/regions/gguf_weights.py", "patches"),  # the LoRAs of a weight of ComfyUI-GGUF
    )

    @pytest.fixture
    def table(self) -> ModuleType:
        return load(self.HOME)

    def test_no_other_file_writes_one_of_the_names(self, table: ModuleType) -> None:
        found = {name for name, _ in written(table.MEANINGS, ["value"]) - {*self.OTHER_MEANINGS}}
        assert found == {f"nodes/adapters/{self.HOME}"}

    def test_every_name_has_a_meaning(self, table: ModuleType) -> None:
        assert [name for name, meaning in table.MEANINGS.items() if not meaning] == []
        named = {value for name, value in vars(table).items() if name.isupper() and isinstance(value, str)}
        assert named <= table.MEANINGS.keys()

    def test_a_value_of_a_key_is_no_part_of_what_may_be_ignored(self, table: ModuleType) -> None:
        """A graph has no key for it, so a whole call with one is not captured."""
        keyed = table.names_of(table.Meaning.KEYED)
        assert keyed.isdisjoint(table.names_of(table.Meaning.INERT | table.Meaning.PASSED_ON))
        assert table.unknown_in(dict.fromkeys(keyed, 1)) == sorted(keyed)

    def test_attention_of_another_node_is_in_no_graph(self, table: ModuleType) -> None:
        assert table.unknown_in({table.OVERRIDE: None, table.PATCHES: {}, table.SIGMAS: None}) == [table.OVERRIDE]

    def test_patches_of_attention_are_those_at_the_place_of_the_block(self, table: ModuleType) -> None:
        place = {table.BLOCK: ("input", 4), table.BLOCK_INDEX: 1}
        for there in (("input", 4), ("input", 4, 1)):
            assert table.patches_of_attention({table.REPLACEMENTS: {"attn2": {there: print}}, **place}) == ["attn2"]
        for elsewhere in (("input", 5), ("input", 4, 0)):
            assert table.patches_of_attention({table.REPLACEMENTS: {"attn2": {elsewhere: print}}, **place}) == []
        assert table.patches_of_attention({table.PATCHES: {"attn1_patch": [print], "emb_patch": [print]}}) == [
            "attn1_patch"
        ]


class TestWhoseCodeRuns:
    """Only these rooms read who wrote a class or a function. Others ask them one question, such as `is_core`."""

    FACTS, JUDGEMENT = "compile_cache/foreign/", "nodes/adapters/foreign/"
    EXCEPTIONS = (
        ("__init__.py", "__module__"),  # finds an earlier copy of this pack by its registered node
        ("compile_cache/errors.py", "__module__"),  # the names of our own errors
    )
    # Facts that may be read elsewhere, since nothing is decided by them: parts of a key, and names for tables.
    NOTHING_IS_DECIDED_BY = (
        ("compile_cache/backends/cuda_graphs/host_constants.py", "modules_of"),
        ("compile_cache/backends/cuda_graphs/kept_tensors.py", "modules_of"),
        ("compile_cache/regions/structure.py", "full_name"),
        ("compile_cache/regions/structure.py", "module_of"),
    )

    def elsewhere(self, found: set[tuple[str, str]]) -> set[tuple[str, str]]:
        return {(name, word) for name, word in found if not name.startswith((self.FACTS, self.JUDGEMENT))}

    def test_no_other_file_reads_where_code_was_written(self) -> None:
        assert self.elsewhere(written({"__module__", "__globals__"})) == set(self.EXCEPTIONS)

    def test_no_other_file_compares_authors(self) -> None:
        facts = {node.name for node in SYNTAX[f"{self.FACTS}names.py"] if isinstance(node, ast.FunctionDef)}
        assert "origin" in facts
        imported = {
            (name, alias.name)
            for name, nodes in SYNTAX.items()
            for node in nodes
            if isinstance(node, ast.ImportFrom) and (node.module or "").endswith("names")
            for alias in node.names
            if alias.name in facts
        }
        assert self.elsewhere(imported) == set(self.NOTHING_IS_DECIDED_BY)


class TestPixelsInACell:
    HOME = "nodes/adapters/comfyui/latent_cells.py"
    OTHER_EIGHTS = (
        "compile_cache/backends/cuda_graphs/memory.py",  # a part of the memory to ask for
        "compile_cache/backends/inductor/backend.py",  # torch 2.8
        "compile_cache/backends/inductor/compile/casts.py",  # compute capability 8.9
        "compile_cache/backends/inductor/compile/environment.py",  # digits of a digest
        "compile_cache/backends/inductor/regions/table.py",  # compiled sizes of a region
        "compile_cache/backends/oneflow/packages.py",  # compute capability 8.0
        "compile_cache/regions/gguf_types.py",  # bits of a byte
        "nodes/adapters/deepcache/schedule.py",  # steps
        "nodes/adapters/report/table_and_chart.py",  # pixels of a chart
        "nodes/adapters/restart/preload.py",  # models
        "nodes/adapters/scan/latents.py",  # cells that LatentCrop leaves
        "nodes/adapters/scan/numbers.py",  # the default of core's ResolutionSelector
    )

    def test_no_other_file_has_the_number(self) -> None:
        eights = {
            name
            for name, nodes in SYNTAX.items()
            for node in nodes
            if isinstance(node, ast.Constant) and type(node.value) is int and node.value == 8
        }
        assert eights == {self.HOME, *self.OTHER_EIGHTS}

    def test_a_model_of_an_old_version_and_an_odd_vae_have_the_default(self) -> None:
        cells = load("comfyui/latent_cells.py")
        assert [cells.of_format(each) for each in (None, object())] == [cells.DEFAULT] * 2
        assert cells.of_format(SimpleNamespace(spacial_downscale_ratio=32)) == 32
        ratios = {8: 8, 16: 16, (lambda: 0, 16, 32): 32, (lambda: 0, 8, lambda: 0): cells.DEFAULT}
        assert {ratio: cells.of_vae(SimpleNamespace(upscale_ratio=ratio)) for ratio in ratios} == ratios
