"""Compile the diffusion model of a MODEL."""

from __future__ import annotations

from typing import Any

from ....compile_cache.keys import Role
from ..blocks import left_out
from ..blocks.families import families_for
from ..forward.call_watch import count_bypass
from ..forward.patch_install import install_compiled_forward
from ..forward.replaced_forward import describe_code, watch_calls
from ..sampling import cond_batching, memory
from ..sampling.core_compiler_off import switch_off_while_sampling
from ..sampling.step_overlap import overlap_steps
from ..weights.static_clone import static_clone
from .backend_choice import explain_passthrough, prepare_backend

_NETWORK = "diffusion_model"


def compile_diffusion_model(
    model: Any,
    backend: str,
    node_id: str | None = None,
    policy: str = cond_batching.AUTO,
    leave_out: str = "",
) -> Any:
    """A clone of `model` (a ModelPatcher) whose diffusion model runs through the cache. Compiles nothing yet.

    The hook is innermost, so wrappers of other packs compose with it in either order. `policy`: see `cond_batching`.
    `leave_out`: kinds or places of blocks that run as they are, separated by commas; UserError for an unknown one.
    A model whose network another node exchanged comes back as it is, and the node says so: ComfyUI would put our hook
    back onto the wrong one. Raises UnknownBackendError or BackendUnavailableError.
    """
    exchanged = model.object_patches.get(_NETWORK)
    own = model.object_patches_backup.get(_NETWORK, model.model.diffusion_model)
    if exchanged not in (None, own):
        reason = f"another node put {describe_code(exchanged)} in place of the whole network: it runs as it is"
        explain_passthrough(reason, node_id)
        count_bypass(reason, is_logged=True)
        return model
    families, names = families_for(Role.UNET), left_out.names_in(leave_out)
    if names:
        left_out.require_known(names, families, model.get_model_object(_NETWORK))
        families = left_out.without(families, names)
    capabilities = prepare_backend(backend, model.load_device, node_id)
    clone = static_clone(model) if capabilities.needs_static_weights else model.clone()
    clone.object_patches.pop(_NETWORK, None)  # a disabled compile node patches the network by itself
    # Most diffusion models of core split `forward` (wrappers) from `_forward` (the computation); some do not.
    method = "_forward" if hasattr(clone.get_model_object(_NETWORK), "_forward") else "forward"
    name = f"{_NETWORK}.{method}"
    cell = getattr(getattr(clone.model, "latent_format", None), "spacial_downscale_ratio", 8)  # absent in 0.8.0
    install_compiled_forward(clone, name, backend, Role.UNET, families, node_id, names, cell)
    watch_calls(clone, name)
    switch_off_while_sampling(clone)
    cond_batching.apply(clone, policy)
    memory.make_room_before_sampling(clone)
    overlap_steps(clone)
    return clone
