"""Which node of ours takes the place of which node of OneDiff's, ComfyUI's or KJNodes', where one does.

Only pairs whose inputs correspond one to one: ComfyUI's migration copies values and links, and cannot compute.
DeepCache's inputs have to be computed, and a booster or a loader that became two nodes has no single one in its place.
"""

from __future__ import annotations

from ...compile_cache.backends.registry import AUTO
from ..adapters.comfyui.node_replacements import Replacement

_COMPILE = {"backend": AUTO}


def _compiles(old_id: str, widgets: tuple[str, ...], kind: str = "model", old_input: str = "") -> Replacement:
    new_id = {
        "model": "ResoluteCompileModel",
        "vae": "ResoluteCompileVAEDecode",
        "control_net": "ResoluteCompileControlNet",
    }[kind]
    return Replacement(old_id, new_id, widgets, {kind: old_input or kind}, _COMPILE)


def _loads(old_id: str, widgets: tuple[str, ...]) -> Replacement:
    values = {**_COMPILE, "compile_vae": True}
    return Replacement(old_id, "ResoluteLoadCheckpoint", widgets, {"ckpt_name": "ckpt_name"}, values)


ONEDIFF = (
    _compiles("ModelSpeedup", ("inplace",)),
    _compiles("SVDSpeedup", ("inplace", "cache_name")),
    _compiles("VaeSpeedup", ("inplace",), "vae"),
    _compiles("ControlnetSpeedup", ("inplace",), "control_net"),
    _compiles("ControlNetSpeedup", ("static_mode",), "control_net"),
    _loads("OneDiffCheckpointLoaderSimple", ("ckpt_name", "vae_speedup")),
    _loads("OneDiffQuantCheckpointLoaderSimple", ("ckpt_name", "vae_speedup")),
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
    _compiles("TorchCompileVAE", (), "vae"),
    _compiles("TorchCompileControlNet", (), "control_net", "controlnet"),
)
