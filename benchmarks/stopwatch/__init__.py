"""A node pack without nodes, for benchmarks: it logs the duration of each sampling run.

The time starts when a sampler node calls `CFGGuider.sample` and ends when that returns, with the GPU idle before and
after. It includes loading the model, but not ComfyUI's work around a node (caches, messages, files).
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
