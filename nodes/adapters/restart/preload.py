"""What happens before a prompt of ours runs: say what is ready, and load and import what it will wait for."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from typing import Any

import comfy.model_management
import torch
import torch._dynamo  # here: two threads that import it at once, a node's and ours, find it half made

from ....compile_cache.backends import registry
from ....compile_cache.errors import UserError
from ....compile_cache.keys import GraphKey
from ..process import runtime
from . import shape_status

logger = logging.getLogger(__name__)

_MODULES = 8  # that were used last: a UNet, a decoder and a ControlNet are three
_begun = False


def begin(server: Any) -> None:
    """Look ahead when `server` (ComfyUI's PromptServer) starts to serve, and when somebody queues a prompt.

    By then every pack is imported, and a thread of ours cannot get in the way of another pack's imports.
    """
    global _begun
    if _begun:
        return
    _begun = True

    async def start(app: Any) -> None:
        threading.Thread(target=_look_ahead, name="resolute-look-ahead", daemon=True).start()

    server.app.on_startup.append(start)
    server.add_on_prompt_handler(before_prompt)


def before_prompt(body: dict[str, Any]) -> dict[str, Any]:
    """Let the backends of a prompt's nodes of ours get ready while it loads its models. Gives the body of the request
    back as it is, which ComfyUI has not looked at yet.
    """
    try:
        chosen = {each for node in body["prompt"].values() if (each := _backend(node)) is not None}
        device = comfy.model_management.get_torch_device()
        for name in chosen:
            registry.resolve(name, device.type)[0].prewarm(device, runtime.cache().config)
    except Exception as error:  # whatever is wrong with it is ComfyUI's, or the node's, to say
        logger.debug("Resolute: nothing is got ready for this prompt", exc_info=error)
    return body


def _backend(node: Mapping[str, Any]) -> str | None:
    choice = node.get("inputs", {}).get("backend")
    return choice if choice in registry.CHOICES and node["class_type"].startswith("Resolute") else None


def _look_ahead() -> None:
    try:
        look_ahead(comfy.model_management.get_torch_device())
    except UserError as error:  # a setting: every node of ours says so too
        logger.warning("Resolute: %s Nothing of Resolute runs until that is mended and ComfyUI started again.", error)
    except Exception:
        logger.warning("Resolute: nothing was loaded ahead", exc_info=True)


def look_ahead(device: torch.device) -> None:
    """Load what the models that were used last were compiled to, and log what is ready."""
    cache = runtime.cache()
    for model in cache.shapes.models()[:_MODULES]:
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
