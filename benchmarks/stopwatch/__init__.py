"""A node pack without nodes, for benchmarks: it writes into the log how long each sampling run took.

From the moment that a sampler node hands its latents over until it has them back, the GPU idle before and after: what
ComfyUI does around a node (caches, messages, files) is left out, what it does to load the model is not.
"""

from __future__ import annotations

import functools
import time
from typing import Any

import comfy.samplers
import torch

NODE_CLASS_MAPPINGS: dict[str, Any] = {}
_sample = comfy.samplers.CFGGuider.sample


@functools.wraps(_sample)
def _timed(*args: Any, **kwargs: Any) -> Any:
    _wait()
    started = time.perf_counter()
    try:
        return _sample(*args, **kwargs)
    finally:
        _wait()
        print(f"stopwatch: sampled for {time.perf_counter() - started:.4f} s", flush=True)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


comfy.samplers.CFGGuider.sample = _timed
