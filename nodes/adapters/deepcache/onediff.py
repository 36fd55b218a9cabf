"""OneDiff's DeepCache parameters in terms of ours."""

from __future__ import annotations

from collections.abc import Sequence

from ....compile_cache.errors import UserError
from .schedule import Settings

# OneDiff's "steps" are the model's noise levels, of which Stable Diffusion has a thousand, counted from pure noise.
_NOISE_LEVELS = 1000


def from_onediff(
    num_res_blocks: Sequence[int],
    cache_interval: int = 3,
    cache_layer_id: int = 0,
    cache_block_id: int = 1,
    start_step: int = 0,
    end_step: int = 1000,
) -> Settings:
    """The Settings that do what a OneDiff node with these parameters is meant to do.

    num_res_blocks: of the UNet, one number for each level. The defaults are OneDiff's, and give depth 2.

    - OneDiff caches before output block -(cache_depth + 1), with cache_depth = sum(num_res_blocks[:cache_layer_id]) +
      cache_block_id + 1, and runs input blocks 0 to cache_depth in its fast pass: just what our `depth` means, so
      depth = cache_depth. (It counts no downsampling blocks, so layer 1 begins one block early; that is kept.)
    - `start_step` and `end_step` are no steps of the sampler: 0 is pure noise and 1000 the finished picture, whatever
      the number of steps. They are start and end percent times 1000.
    - Outside that window OneDiff runs its fast pass without a feature; we run the full one.

    Raises UserError where OneDiff would fail: a layer that the model does not have.
    """
    if not 0 <= cache_layer_id <= len(num_res_blocks):
        raise UserError(f"cache_layer_id {cache_layer_id} is outside what this model has: 0 to {len(num_res_blocks)}.")
    return Settings(
        interval=cache_interval,
        depth=sum(num_res_blocks[:cache_layer_id]) + cache_block_id + 1,
        start_percent=start_step / _NOISE_LEVELS,
        end_percent=end_step / _NOISE_LEVELS,
    )
