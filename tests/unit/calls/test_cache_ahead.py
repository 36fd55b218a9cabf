"""What the next process remembers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from compile_cache.call_policy import ANYTHING
from compile_cache.calls.cache import GraphCache
from compile_cache.config import CacheConfig

from ..fakes import BUDGET, OBSERVED, FakeProgram, Module


class TestRemembering:
    @pytest.fixture
    def kept(self, tmp_path: Path) -> CacheConfig:
        return CacheConfig(budget_bytes=BUDGET, store_folder=tmp_path)

    def test_the_next_process_knows_what_was_called(self, kept: CacheConfig, program: Any, module: Module) -> None:
        cache = GraphCache(kept)
        for side in (8, 16, 8):
            cache.run(program, module.call(side))
        found = GraphCache(kept).shapes.of_model("model" * 8)
        assert [graph.key for graph in found] == [module.call(8).key, module.call(16).key]
        assert all(graph.seconds >= 0 for graph in found)

    def test_the_next_process_names_the_flag_of_torch_that_changed_meanwhile(
        self, kept: CacheConfig, program: Any, module: Module
    ) -> None:
        def texts(*flags: bool) -> list[str]:
            """Of a process in which the model is called under each of these settings."""
            cache = GraphCache(kept)
            for flag in flags:
                under = (("fp16 accumulation", flag), ("autocast", "off"))
                cache.run(FakeProgram(), module.call(8, torch_flags=under))
            return [event.text for event in cache.stats.events if event.kind == "signature"]

        since = "; since it last ran, torch's settings changed: fp16 accumulation"
        first = "unet 1x4x8x8: first graph of this module"
        assert texts(False) == [first]
        assert texts(False) == [first]
        assert texts(True) == [f"{first}{since} False -> True"]
        assert texts(True, False) == [first, "unet 1x4x8x8: fp16 accumulation True -> False"]
        assert texts(True) == [f"{first}{since} False -> True"]

    def test_calls_that_were_not_captured_because_of_a_patch_are_not(
        self, kept: CacheConfig, program: Any, module: Module
    ) -> None:
        cache = GraphCache(kept)
        cache.run(program, module.call(8, policy=ANYTHING.once(OBSERVED)))
        assert cache.shapes.models() == []

    def test_it_can_be_turned_off(self, kept: CacheConfig, program: Any, module: Module) -> None:
        cache = GraphCache(replace(kept, remember=False))
        cache.run(program, module.call(8))
        assert GraphCache(kept).shapes.models() == []
