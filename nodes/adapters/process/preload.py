"""Before a prompt runs: log which shapes are ready, preload compiled regions, and prewarm backends."""

from __future__ import annotations

import collections
import gc
import logging
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any

import comfy.model_management
import torch

from ....compile_cache.backends import registry
from ....compile_cache.errors import UserError
from ....compile_cache.keys import GraphKey
from ....compile_cache.store.shape_history import Model
from ....compile_cache.torch_compat import fake_devices
from ....compile_cache.torch_compat.private_names import dynamo, yielding_gil  # noqa: F401 (two threads that import it at once find half of it)
from ..comfyui.compile_nodes import WITH_AUTO
from ..trust import model_code
from . import collector, runtime, shape_status

logger = logging.getLogger(__name__)

_MAX_MODELS = 8  # the last used; a UNet, a decoder and a ControlNet count as three
_pending: dict[str, list[tuple[str, str]]] = {}  # by model: (backend, key) of the regions still to be loaded
_wanted: collections.deque[str] = collections.deque(maxlen=_MAX_MODELS)  # models of queued prompts, the latest last


def begin(server: Any) -> None:
    """Preload when `server` (ComfyUI's PromptServer) starts to serve, and prewarm when a prompt is queued.

    Earlier, ComfyUI still imports packs, and a thread of ours could disturb another pack's imports. Only
    `fake_devices.keep` must run before a thread of another pack traces anything.
    """
    fake_devices.keep()
    # Present objects stay alive, and each of ComfyUI's collections, every 10 s, would scan them for 0.4 s. A later
    # freeze would include ComfyUI's executor, whose first cache would then keep models forever.
    gc.freeze()

    async def start(app: Any) -> None:
        threading.Thread(target=_preload, name="resolute-preload", daemon=True).start()

    server.app.on_startup.append(start)
    server.add_on_prompt_handler(before_prompt)


def before_prompt(body: dict[str, Any]) -> dict[str, Any]:
    """Prewarm the backends that a queued prompt will use, while it loads its models.

    body: the request's body, which ComfyUI has not validated yet. Returns it unchanged.
    """
    try:
        chosen = {each for node in body["prompt"].values() if (each := _backend(node)) is not None}
        device = comfy.model_management.get_torch_device()
        for name in chosen:
            for backend in registry.candidates(name):  # `resolve` may import inductor, too slow for the server
                backend.prewarm(device, runtime.cache().config, runtime.cache().stats.host)
    except Exception as error:  # ComfyUI or the node reports the prompt's error
        logger.debug("Resolute: no backend was prewarmed for this prompt", exc_info=error)
    return body


def _backend(node: Mapping[str, Any]) -> str | None:
    if node.get("class_type") in WITH_AUTO:
        return registry.AUTO
    choice = node.get("inputs", {}).get("backend")
    return choice if choice in registry.CHOICES and node["class_type"].startswith("Resolute") else None


def _preload() -> None:
    try:
        device, config = comfy.model_management.get_torch_device(), runtime.cache().config
        with yielding_gil():  # to a prompt that was queued at once
            model_code.read_ahead()
            preload(device)
        registry.candidates(registry.AUTO)[0].prewarm(device, config, runtime.cache().stats.host)
    except UserError as error:  # a setting; each of our nodes raises it too
        logger.warning("Resolute: %s No Resolute node runs until it is corrected and ComfyUI is started again.", error)
    except Exception:
        logger.warning("Resolute: compiled regions were not preloaded", exc_info=True)


def load_first(module: torch.nn.Module) -> None:
    """Load the regions of a queued model before those of others, if there is anything left to load."""
    if _pending:
        _wanted.append(runtime.fingerprint_of(module))


def preload(device: torch.device) -> None:
    """Load the compiled regions of the models used last, a queued model's first, and log which are ready.

    If a model lacks regions, workers start when the first region is loaded: they import torch while the others load.
    """
    cache = runtime.cache()
    models = {model.digest: model for model in cache.shapes.models()[:_MAX_MODELS]}
    pending, has_looked = _pending, False
    pending.update({digest: _regions(model, device) for digest, model in models.items()})
    if pending:
        collector.make_full_collections_rare()  # a prompt may already wait for this thread's imports
    loaded, seconds = collections.Counter[str](), collections.defaultdict[str, float](float)
    while pending:
        digest = next((model for model in reversed(_wanted) if model in pending), next(iter(pending)))
        if pending[digest]:
            backend, region = pending[digest].pop()
            started = time.perf_counter()
            loaded[digest] += registry.get(backend).preload([region], device, cache.config)
            seconds[digest] += time.perf_counter() - started
            if not has_looked and _lacks_regions(models.values(), device):
                registry.candidates(registry.AUTO)[0].prewarm(device, cache.config, cache.stats.host, True)
            has_looked = True
            continue
        del pending[digest]
        cache.stats.counters.region_loads += loaded[digest]
        cache.stats.counters.region_preloads += loaded[digest]
        if loaded[digest]:
            cache.stats.event("load", f"{loaded[digest]} regions of {models[digest].name}, ahead", seconds[digest])
        logger.info("Resolute: %s", shape_status.line(models[digest], cache, device))


def _lacks_regions(models: Iterable[Model], device: torch.device) -> bool:
    located = [shape_status.locate(model.graphs, runtime.cache(), device) for model in models]
    return any(found.missing for by_backend in located for found in by_backend.values())


def _regions(model: Model, device: torch.device) -> list[tuple[str, str]]:
    """(backend, key) of each region that the model ran on this type of device."""
    used = [graph for graph in model.graphs if graph.key.backend in registry.NAMES and _is_on(graph.key, device)]
    return sorted({(graph.key.backend, region) for graph in used for region in graph.regions})


def _is_on(key: GraphKey, device: torch.device) -> bool:
    return all(spec.device == device.type for _, spec in key.signature.tensors[:1])
