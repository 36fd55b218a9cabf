"""What happens before a prompt runs: log what is ready, load compiled regions, start what a backend will need."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from typing import Any

import comfy.model_management
import torch

from ....compile_cache.backends import registry
from ....compile_cache.errors import UserError
from ....compile_cache.keys import GraphKey
from ....compile_cache.torch_private import dynamo  # noqa: F401 (two threads that import it at once find half of it)
from ..process import runtime
from . import shape_status

logger = logging.getLogger(__name__)

_MAX_MODELS = 8  # those used last; a UNet, a decoder and a ControlNet are three
_begun = False


def begin(server: Any) -> None:
    """Preload when `server` (ComfyUI's PromptServer) starts to serve, and prewarm when a prompt is queued.

    Not before: until then packs are imported, and a thread of ours could disturb another pack's imports.
    """
    global _begun
    if _begun:
        return
    _begun = True

    async def start(app: Any) -> None:
        threading.Thread(target=_preload, name="resolute-preload", daemon=True).start()

    server.app.on_startup.append(start)
    server.add_on_prompt_handler(before_prompt)


def before_prompt(body: dict[str, Any]) -> dict[str, Any]:
    """Prewarm the backends that a queued prompt will use, while it loads its models.

    body: of the request, which ComfyUI has not validated yet. Returns it unchanged.
    """
    try:
        chosen = {each for node in body["prompt"].values() if (each := _backend(node)) is not None}
        device = comfy.model_management.get_torch_device()
        for name in chosen:
            for backend in registry.candidates(name):  # not `resolve`, which may import inductor: this is the server
                backend.prewarm(device, runtime.cache().config)
    except Exception as error:  # ComfyUI, or the node, reports what is wrong with the prompt
        logger.debug("Resolute: no backend was prewarmed for this prompt", exc_info=error)
    return body


def _backend(node: Mapping[str, Any]) -> str | None:
    choice = node.get("inputs", {}).get("backend")
    return choice if choice in registry.CHOICES and node["class_type"].startswith("Resolute") else None


def _preload() -> None:
    try:
        preload(comfy.model_management.get_torch_device())
    except UserError as error:  # a setting; each of our nodes raises it too
        logger.warning("Resolute: %s No Resolute node runs until it is corrected and ComfyUI is started again.", error)
    except Exception:
        logger.warning("Resolute: compiled regions were not preloaded", exc_info=True)


def preload(device: torch.device) -> None:
    """Load the compiled regions of the models that were used last, and log what is ready."""
    cache = runtime.cache()
    for model in cache.shapes.models()[:_MAX_MODELS]:
        started = time.perf_counter()
        loaded = 0
        for backend in {graph.key.backend for graph in model.graphs} & set(registry.NAMES):
            regions = frozenset[str]().union(*(g.regions for g in model.graphs if _is_of(g.key, backend, device)))
            loaded += registry.get(backend).preload(sorted(regions), device, cache.config)
        cache.stats.counters.region_loads += loaded
        if loaded:
            cache.stats.event("load", f"{loaded} regions of {model.name}, ahead", time.perf_counter() - started)
        logger.info("Resolute: %s", shape_status.line(model, cache, device))


def _is_of(key: GraphKey, backend: str, device: torch.device) -> bool:
    return key.backend == backend and all(spec.device == device.type for _, spec in key.signature.tensors[:1])
