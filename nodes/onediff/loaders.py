"""OneDiff's loaders: core's loader, and the compile nodes behind it."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import folder_paths
from comfy_api.latest import io

import nodes

from ...compile_cache.errors import UserError, excerpt
from ..adapters.onediff.boosters import NOT_QUANTIZED, Booster, speed_up_controlnet, speed_up_model, speed_up_vae
from .common import (
    DEEPCACHE_TEXT,
    booster_input,
    deepcache_from,
    deepcache_inputs,
    ignored_text,
    node,
    static_mode_input,
    vae_speedup_input,
)

_ADVANCED_TEXT = "Nothing is quantized: model_path is not read, and the checkpoint is compiled in its own precision."


def _file_input(name: str, folder: str) -> Any:
    return io.Combo.Input(
        name, options=folder_paths.get_filename_list(folder), tooltip=f"A file in ComfyUI's models/{folder} folder."
    )


def _checkpoint_outputs() -> list[Any]:
    return [
        io.Model.Output(tooltip="The diffusion model, compiled."),
        io.Clip.Output(tooltip="The text encoder, not compiled."),
        io.Vae.Output(tooltip="The VAE; its decoder is compiled if vae_speedup is enable."),
    ]


def _compiled(loaded: Any, vae_speedup: str, booster: Booster | None, node_id: str | None) -> io.NodeOutput:
    """loaded: model, text or image encoder, and VAE (or None), from a loader of core."""
    model, encoder, vae = loaded
    model = speed_up_model(model, booster, node_id)
    if vae_speedup == "enable" and vae is not None:
        vae = speed_up_vae(vae, booster, node_id)
    return io.NodeOutput(model, encoder, vae)


def _checkpoint(
    node_id: str | None, ckpt_name: str, vae_speedup: str = "disable", custom_booster: Booster | None = None
) -> io.NodeOutput:
    loaded = nodes.CheckpointLoaderSimple().load_checkpoint(ckpt_name)
    return _compiled(loaded, vae_speedup, custom_booster, node_id)


def _with_deepcache(
    node_id: str | None, ckpt_name: str, vae_speedup: str = "disable", static_mode: str = "enable", **inputs: Any
) -> io.NodeOutput:
    return _checkpoint(node_id, ckpt_name, vae_speedup, Booster(deepcache=deepcache_from(inputs)))


def _controlnet(node_id: str | None, control_net_name: str, custom_booster: Booster | None = None) -> io.NodeOutput:
    (control_net,) = nodes.ControlNetLoader().load_controlnet(control_net_name)
    return io.NodeOutput(speed_up_controlnet(control_net, custom_booster, node_id))


def _not_quantized(
    node_id: str | None,
    ckpt_name: str,
    model_path: str = "",
    compile: str = "enable",
    vae_speedup: str = "disable",
    loader: str = "CheckpointLoaderSimple",
) -> io.NodeOutput:
    loaded = nodes.NODE_CLASS_MAPPINGS[loader]().load_checkpoint(ckpt_name)
    return _compiled(loaded, vae_speedup, replace(NOT_QUANTIZED, compiles=compile == "enable"), node_id)


def _refused(node_id: str | None, model_path: str = "") -> io.NodeOutput:
    """Raises UserError always."""
    raise UserError(
        f"UNET Loader Int8 cannot load '{excerpt(model_path)}': only OneDiff reads its int8 files. Load the "
        "original model with Load Diffusion Model or Load Checkpoint, and put Compile Model behind it."
    )


def _advanced_inputs() -> list[Any]:
    tooltip = "disable passes the model on as it was loaded."
    return [
        _file_input("ckpt_name", "checkpoints"),
        ignored_text("model_path"),
        io.Combo.Input("compile", options=["enable", "disable"], default="enable", optional=True, tooltip=tooltip),
        vae_speedup_input(),
    ]


def _video_outputs() -> list[Any]:
    model, _, vae = _checkpoint_outputs()
    return [model, io.ClipVision.Output(tooltip="The image encoder, not compiled."), vae]


NODES = [
    node(
        "OneDiffCheckpointLoaderSimple",
        "Load Checkpoint - OneDiff",
        "Load Checkpoint (Compiled)",
        "It loads and compiles; vae_speedup compiles the VAE's decoder too.",
        lambda: [_file_input("ckpt_name", "checkpoints"), vae_speedup_input(), booster_input()],
        _checkpoint_outputs,
        _checkpoint,
    ),
    node(
        "OneDiffDeepCacheCheckpointLoaderSimple",
        "Load Checkpoint - OneDiff DeepCache",
        "Load Checkpoint (Compiled) and DeepCache",
        DEEPCACHE_TEXT,
        lambda: [
            _file_input("ckpt_name", "checkpoints"),
            vae_speedup_input(),
            static_mode_input(),
            *deepcache_inputs(),
        ],
        _checkpoint_outputs,
        _with_deepcache,
    ),
    node(
        "OneDiffControlNetLoader",
        "Load ControlNet Model - OneDiff",
        "Load ControlNet Model and Compile ControlNet",
        "It loads and compiles. A ControlLora runs as it is, and the node says so.",
        lambda: [_file_input("control_net_name", "controlnet"), booster_input()],
        lambda: [io.ControlNet.Output(tooltip="The ControlNet, compiled.")],
        _controlnet,
    ),
    node(
        "OneDiffQuantCheckpointLoaderSimple",
        "Load Checkpoint - OneDiff Quant",
        "Load Checkpoint (Compiled)",
        "Nothing is quantized: the model is compiled in its own precision.",
        lambda: [_file_input("ckpt_name", "checkpoints"), vae_speedup_input()],
        _checkpoint_outputs,
        _not_quantized,
    ),
    node(
        "OneDiffQuantCheckpointLoaderSimpleAdvanced",
        "Load Checkpoint - OneDiff Quant Advanced",
        "Load Checkpoint (Compiled)",
        _ADVANCED_TEXT,
        _advanced_inputs,
        _checkpoint_outputs,
        _not_quantized,
    ),
    node(
        "ImageOnlyOneDiffQuantCheckpointLoaderAdvanced",
        "Load Checkpoint - OneDiff Quant Advanced (img2vid)",
        "Image Only Checkpoint Loader and Compile Model",
        _ADVANCED_TEXT,
        _advanced_inputs,
        _video_outputs,
        functools.partial(_not_quantized, loader="ImageOnlyCheckpointLoader"),
    ),
    node(
        "UNETLoaderInt8",
        "UNET Loader Int8",
        "Load Diffusion Model and Compile Model",
        "Only OneDiff reads its int8 files, so this node stops the prompt and says which nodes to use.",
        lambda: [
            io.String.Input("model_path", default="", optional=True, tooltip="A folder with OneDiff's int8 files.")
        ],
        lambda: [io.Model.Output(tooltip="Never reached.")],
        _refused,
    ),
]
