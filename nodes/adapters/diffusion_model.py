"""Compile the diffusion model of a MODEL."""

from __future__ import annotations

from typing import Any

from ...compile_cache.keys import Role
from . import batching, memory
from .blocks import flux, unet
from .delegate import static_clone
from .hooking import hook_forward
from .module_runner import prepare_backend

_FAMILIES = (unet.hooks, flux.hooks)


def compile_diffusion_model(model: Any, backend: str, node_id: str | None = None, policy: str = batching.AUTO) -> Any:
    """A clone of `model` (a ModelPatcher) whose diffusion model runs through the cache. Compiles nothing yet.

    The hook is innermost, so wrappers of other packs compose with it in either order. `policy`: see `batching`.
    Raises UnknownBackendError or BackendUnavailableError.
    """
    prepare_backend(backend, model.load_device, node_id)
    clone = static_clone(model)
    # Most diffusion models of core split `forward` (wrappers) from `_forward` (the computation); some do not.
    method = "_forward" if hasattr(clone.get_model_object("diffusion_model"), "_forward") else "forward"
    hook_forward(clone, f"diffusion_model.{method}", backend, Role.UNET, _FAMILIES, node_id)
    batching.apply(clone, policy)
    memory.make_room_before_sampling(clone)
    return clone
