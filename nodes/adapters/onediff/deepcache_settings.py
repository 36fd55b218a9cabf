"""OneDiff's DeepCache inputs as `Settings` of ours. Plain numbers: no torch, no ComfyUI."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ....compile_cache.texts import Text
from ..deepcache.schedule import Settings

_STEPS = 1000  # OneDiff counts noise levels from 0 (pure noise) to 1000
# OneDiff's inputs, in order, with their defaults. cache_layer_id, cache_block_id: the UNet's level and its block whose
# feature is cached. start_step, end_step: noise levels, not steps of the sampler.
DEFAULTS = {"cache_interval": 3, "cache_layer_id": 0, "cache_block_id": 1, "start_step": 0, "end_step": _STEPS}


def translate(
    inputs: Mapping[str, int], blocks_of_levels: Sequence[int], deepest: int
) -> tuple[Settings | None, tuple[str, ...]]:
    """Returns our settings (None if every step runs in full) and a sentence for each input that was changed or refused.

    inputs: by the names of DEFAULTS. blocks_of_levels: `num_res_blocks` of the UNet. deepest: the largest depth that
    our DeepCache accepts for it. OneDiff sums the blocks of the levels above, the block's number and 1; the sum is our
    depth.
    """
    start, end = inputs["start_step"], inputs["end_step"]
    if start >= end:
        return None, (
            Text("start_step {start} is not before end_step {end}, so every step runs in full", start=start, end=end),
        )
    wanted = sum(blocks_of_levels[: inputs["cache_layer_id"]]) + inputs["cache_block_id"] + 1
    depth = min(wanted, deepest)
    text = "cache_layer_id and cache_block_id give depth {wanted}; this UNet has {depth}"
    notes = () if depth == wanted else (Text(text, wanted=wanted, depth=depth),)
    return Settings(max(1, inputs["cache_interval"]), depth, start / _STEPS, end / _STEPS), notes
