"""Free the memory of captures: on request, and before sampling if the model would not fit beside them."""

from __future__ import annotations

import logging
from typing import Any

import comfy.model_management
import comfy.sampler_helpers

from ....compile_cache.backends import registry
from ....compile_cache.backends.cuda_graphs.memory import release_graph_memory
from ....compile_cache.texts import Text
from ..comfyui import version
from ..comfyui.messages import broadcast
from ..comfyui.prompt_end import when_prompt_ends
from ..process import runtime

logger = logging.getLogger(__name__)


def free_graphs() -> int:
    """Free all captures that no running session uses. Returns their bytes.

    May be called from any thread. It waits for a running call, because freeing memory during a capture makes it fail.
    """
    freed = runtime.cache().trim()
    logger.info("Resolute: freed %d MiB of captured graphs", freed >> 20)
    broadcast("freed", bytes=freed)
    return freed


def _free_by_hand() -> int:
    """For the button: also compare calls again and retry failed compiles. The node runs in each prompt and does not."""
    runtime.cache().compiled_vs_eager.measure_again()
    for name in registry.NAMES:
        registry.get(name).retry_failed()
    return free_graphs()


def free_or_wait(queue: Any) -> dict[str, Any]:
    """Free all captures now, or at the end of the running prompt; then compare decodes again and retry failed compiles.
    queue: ComfyUI's PromptQueue.

    Returns `state` ("freed", "nothing" or "later"), the `bytes` that were freed, and a `text` for people with its
    `words`.
    """
    state, freed = "later", 0
    text = Text("The captures are freed when this prompt ends.")
    if not when_prompt_ends(queue, _free_by_hand):
        freed = _free_by_hand()
        state, text = "freed" if freed else "nothing", freed_text(freed)
    return {"state": state, "bytes": freed, "text": text, "words": text.words}


def freed_text(freed: int) -> Text:
    """The message of the panel's button and of Free Graphs. freed: bytes of captures."""
    return Text("Freed {size}.", size=f"{freed / 2**20:.0f} MiB") if freed else Text("No captures to free.")


def make_room(executor: Any, patcher: Any, noise_shape: Any, conds: Any, *args: Any, **kwargs: Any) -> Any:
    """Wraps the preparation of a sampling run: free as many captures as the model's weights need to fit.

    Otherwise ComfyUI would load the model partially and stream its weights, because it does not know that captures can
    be freed. PREPARE_SAMPLING is the last wrapper that runs before ComfyUI loads the model.
    """
    if runtime.cache().bytes and not version.is_dynamic(patcher):  # paged weights make room for themselves
        missing = _missing(patcher, noise_shape, conds)
        if missing > 0 and (freed := runtime.cache().trim(missing)):
            release_graph_memory()
            comfy.model_management.soft_empty_cache()
            logger.info("Resolute: freed %d MiB of captured graphs to make room for the model", freed >> 20)
    return executor(patcher, noise_shape, conds, *args, **kwargs)


def _missing(patcher: Any, noise_shape: Any, conds: Any) -> int:
    """Bytes that the device lacks for the weights still to load and for the run. Negative if there is room.

    The estimate is the one of core's `load_models_gpu`.
    """
    management = comfy.model_management
    run, _ = comfy.sampler_helpers.estimate_memory(patcher, noise_shape, conds)
    run = max(management.minimum_inference_memory(), run + management.extra_reserved_memory())
    weights = patcher.model_size() - patcher.loaded_size()
    return int(1.1 * weights + run - management.get_free_memory(patcher.load_device))
