"""Compile the diffusion model of a MODEL."""

from __future__ import annotations

import functools
from typing import Any

from ....compile_cache.keys import Role
from ....compile_cache.texts import Text
from ..blocks.families import names_in
from ..comfyui import latent_cells, switch
from ..trust.core_code import core_name
from ..trust.describe import describe_code
from .backend_choice import explain_passthrough, request_for
from .patch_install import install_compiled_forward
from .replaced_forward import count_bypass, watched
from .wrappers import AUTO, wrap_sampling

_NETWORK = "diffusion_model"
_WITH_A_CACHE = "comfy.ldm.seedvr.model.NaDiT"  # the cache has closures, and sizes are read from the GPU


def compile_diffusion_model(
    model: Any,
    backend: str,
    node_id: str | None = None,
    policy: str = AUTO,
    leave_out: str = "",
) -> Any:
    """A clone of `model` (a ModelPatcher) whose diffusion model runs through the cache. Compiles nothing yet.

    Our forward is innermost, so wrappers of other packs compose with it in either order. `policy`: one of POLICIES of
    `wrappers`. `leave_out`: kinds or places of blocks that run eagerly, separated by commas; UserError for an unknown
    one. If another node replaced the whole network, returns `model` itself, and the node says so: ComfyUI would put our
    forward back onto the wrong network. Raises UnknownBackendError or BackendUnavailableError.
    """
    if switch.is_off(node_id):
        return model
    exchanged = model.object_patches.get(_NETWORK)
    own = model.object_patches_backup.get(_NETWORK, model.model.diffusion_model)
    if exchanged not in (None, own):
        code = describe_code(exchanged)
        reason = Text("another node put {code} in place of the whole network: it runs eagerly", code=code)
        explain_passthrough(reason, node_id)
        count_bypass(reason, is_logged=True)
        return model
    if core_name(type(own)) == _WITH_A_CACHE:
        explain_passthrough(
            Text("the blocks of SeedVR2 pass on what they computed in a cache: it runs eagerly"), node_id
        )
        return model
    cell = latent_cells.of_format(getattr(model.model, "latent_format", None))
    request = request_for(backend, model, Role.UNET, node_id, left_out=names_in(leave_out), cell=cell)
    clone = model.clone()
    clone.object_patches.pop(_NETWORK, None)  # a disabled compile node patches the network with itself
    # Most diffusion models of core split `forward` (wrappers) from `_forward` (the computation); some do not.
    method = "_forward" if hasattr(clone.get_model_object(_NETWORK), "_forward") else "forward"
    name = f"{_NETWORK}.{method}"
    wrap_sampling(clone, policy, functools.partial(watched, name))
    install_compiled_forward(clone, name, request)
    return clone
