"""Workaround for a crash of torch: its placeholder for CUDA's devices belongs to one thread.

If a torch with CUDA finds no GPU, the first trace registers a placeholder for the whole process. Torch 2.11 frees it
when the thread of that trace ends, and the next trace in any thread reads freed memory: a segmentation fault. Torch
2.15 fixes this: https://github.com/pytorch/pytorch/pull/178950.
"""

from __future__ import annotations

import functools
import logging
import threading

import torch

from .private_names import register_fake_devices

logger = logging.getLogger(__name__)


@functools.cache
def keep() -> None:
    """Register the placeholder in a thread that never ends, if this process has no GPU. Later calls do nothing.

    Call it before any other thread traces, because the first registration stays.
    """
    if torch.cuda.is_available():
        return
    registered = threading.Event()

    def hold() -> None:
        try:
            register_fake_devices()
        except Exception:
            logger.debug("Resolute: there is no stand-in for CUDA's devices", exc_info=True)
        registered.set()
        threading.Event().wait()

    threading.Thread(target=hold, name="resolute-fake-devices", daemon=True).start()
    registered.wait()
