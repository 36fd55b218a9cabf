"""OneDiff's DeepCache inputs in ours, and who owns its node ids."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

SD15_LEVELS = [2, 2, 2, 2]
SD15_DEEPEST = 11


@pytest.fixture
def deepcache(pack: Callable[[str], Any]) -> Any:
    return pack("nodes.adapters.onediff.deepcache_settings")


@pytest.fixture
def precedence(pack: Callable[[str], Any]) -> Any:
    return pack("nodes.adapters.onediff.precedence")


def translated(deepcache: Any, **inputs: int) -> Any:
    return deepcache.translate({**deepcache.DEFAULTS, **inputs}, SD15_LEVELS, SD15_DEEPEST)


class TestDeepCacheInputs:
    def test_the_defaults_of_both_packs_are_the_same(self, deepcache: Any, pack: Callable[[str], Any]) -> None:
        ours = pack("nodes.adapters.deepcache.schedule").Settings()
        assert translated(deepcache) == (ours, ())

    @pytest.mark.parametrize(
        ("layer", "block", "depth"),
        [(0, 0, 1), (0, 1, 2), (0, 2, 3), (1, 0, 3), (1, 1, 4), (2, 1, 6), (3, 2, 9)],
    )
    def test_level_and_block_are_a_depth(self, deepcache: Any, layer: int, block: int, depth: int) -> None:
        settings, notes = translated(deepcache, cache_layer_id=layer, cache_block_id=block)
        assert (settings.depth, notes) == (depth, ())

    def test_a_depth_beyond_the_unet_is_its_deepest_and_a_note(self, deepcache: Any) -> None:
        settings, notes = translated(deepcache, cache_layer_id=12, cache_block_id=12)
        assert settings.depth == SD15_DEEPEST
        assert notes == ("cache_layer_id and cache_block_id give depth 21; this UNet has 11",)

    def test_noise_levels_become_percents(self, deepcache: Any) -> None:
        settings, _ = translated(deepcache, start_step=250, end_step=800)
        assert (settings.start_percent, settings.end_percent) == (0.25, 0.8)

    def test_intervals_over_ten_are_kept(self, deepcache: Any) -> None:
        assert translated(deepcache, cache_interval=37)[0].interval == 37

    def test_an_empty_window_leaves_nothing_to_do(self, deepcache: Any) -> None:
        settings, notes = translated(deepcache, start_step=600, end_step=600)
        assert settings is None
        assert notes == ("start_step 600 is not before end_step 600, so every step runs in full",)


class TestWhoOwnsAnId:
    OURS = {"ModelSpeedup": type("A", (), {}), "VaeSpeedup": type("B", (), {}), "SVDSpeedup": type("C", (), {})}
    THEIRS = type("Theirs", (), {})

    def settled(self, precedence: Any, earlier: dict[str, Any], later: dict[str, Any]) -> SimpleNamespace:
        """ComfyUI's tables after packs that are loaded earlier, ours, and packs that are loaded later."""
        classes = {"KSampler": object, **earlier}
        mine = precedence.free(self.OURS, classes)
        classes |= {node_id: node for node_id, node in self.OURS.items() if node in mine}
        classes |= later
        titles = dict.fromkeys(classes, "a title")
        loaded = precedence.withdraw(self.OURS, classes, titles)
        assert titles.keys() == classes.keys()
        return SimpleNamespace(classes=classes, loaded=loaded)

    def test_without_onediff_all_are_ours(self, precedence: Any) -> None:
        found = self.settled(precedence, {}, {})
        assert (found.loaded, found.classes) == (False, {"KSampler": object, **self.OURS})

    @pytest.mark.parametrize("order", ["earlier", "later"])
    def test_onediff_keeps_its_ids_and_none_is_ours(self, precedence: Any, order: str) -> None:
        theirs = {"ModelSpeedup": self.THEIRS, "VaeSpeedup": self.THEIRS}
        found = self.settled(precedence, **{"earlier": {}, "later": {}, order: theirs})
        assert (found.loaded, found.classes) == (True, {"KSampler": object, **theirs})

    @pytest.mark.parametrize("order", ["earlier", "later"])
    def test_another_pack_keeps_one_id(self, precedence: Any, order: str) -> None:
        found = self.settled(precedence, **{"earlier": {}, "later": {}, order: {"SVDSpeedup": self.THEIRS}})
        assert not found.loaded
        assert found.classes == {"KSampler": object, **self.OURS, "SVDSpeedup": self.THEIRS}
