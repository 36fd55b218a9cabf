"""Which node of ours takes the place of which node of OneDiff's, ComfyUI's or KJNodes', where one does.

Only pairs whose inputs correspond one to one: ComfyUI's migration copies values and links, and cannot compute.
DeepCache's inputs have to be computed, and a booster or a loader that became two nodes has no single one in its place.
"""

from __future__ import annotations

from ...compile_cache.backends.registry import AUTO
from ..adapters.comfyui.node_replacements import Replacement
from .table import COMPILE_CONTROL_NET, COMPILE_MODEL, COMPILE_VAE, LOADER, TABLE

_FIRST_INPUTS = {COMPILE_MODEL: "model", COMPILE_VAE: "vae", COMPILE_CONTROL_NET: "control_net", LOADER: "ckpt_name"}


def _compiles(old_id: str, widgets: tuple[str, ...], new_id: str = COMPILE_MODEL, old_input: str = "") -> Replacement:
    values = {"backend": AUTO, **({"compile_vae": True} if new_id == LOADER else {})}
    name = _FIRST_INPUTS[new_id]
    return Replacement(old_id, new_id, widgets, {name: old_input or name}, values)


ONEDIFF = (
    *(_compiles(old.node_id, tuple(old.widgets), old.replacement) for old in TABLE if old.replacement),
    Replacement(
        "ShowImageDiff",
        "ResoluteCompareImages",
        ("ssim_threshold", "raise_if_diff", "image_id"),
        {"image_a": "images1", "image_b": "images2"},
        {"max_error": 255.0, "min_psnr": 0.0},
    ),
)

# Nodes that compile with torch.compile, of core and of KJNodes. Nothing is wrong with them: see `registration`.
SUGGESTED = (
    _compiles("TorchCompileModel", ("backend",)),
    *(
        _compiles(name, ())
        for name in (
            "TorchCompileModelAdvanced",
            "TorchCompileModelFluxAdvanced",
            "TorchCompileModelFluxAdvancedV2",
            "TorchCompileModelWanVideo",
            "TorchCompileModelWanVideoV2",
            "TorchCompileModelHyVideo",
            "TorchCompileModelQwenImage",
            "TorchCompileLTXModel",
            "TorchCompileCosmosModel",
        )
    ),
    _compiles("TorchCompileVAE", (), COMPILE_VAE),
    _compiles("TorchCompileControlNet", (), COMPILE_CONTROL_NET, "controlnet"),
)
