"""OneDiff's nodes: their ids, titles, inputs, replacements and functions."""

from __future__ import annotations

from functools import partial
from typing import Any

from comfy_api.latest import io

from ...compile_cache.texts import Text
from ..adapters.onediff.boosters import NOT_QUANTIZED
from ..adapters.onediff.deepcache_settings import DEFAULTS
from . import images, runs
from .factory import (
    CustomBooster,
    DeepCacheBooster,
    Folder,
    OldNode,
    QuantizationBooster,
    TorchCompileBooster,
)

_ON, _OFF = ("enable", "disable"), ("disable", "enable")
_BOOSTER = {"custom_booster": CustomBooster}
_FILE = {"ckpt_name": Folder("checkpoints")}
_QUANTIZED_FILE = {**_FILE, "model_path": "", "compile": _ON, "vae_speedup": _OFF}
_MODEL, _VAE, _CONTROL_NET = {"MODEL": io.Model}, {"VAE": io.Vae}, {"CONTROL_NET": io.ControlNet}
_CHECKPOINT = {**_MODEL, "CLIP": io.Clip, **_VAE}
_VIDEO_CHECKPOINT = {**_MODEL, "CLIP_VISION": io.ClipVision, **_VAE}
_FOR_BOOSTER = {"TorchCompileBooster": TorchCompileBooster}

_MODEL_AND_CACHE = "Compile Model and DeepCache"
_LOAD_CHECKPOINT = "Load Checkpoint (Compiled)"
_AUTO = "It compiles with the backend auto"
_AS_CACHE = "start_step and end_step are DeepCache's percents times 1000; level and block give its depth."
_NO_MODEL_PATH = "Nothing is quantized: model_path is not read, and the checkpoint is compiled in its own precision."

_RUN_QUANTIZED = partial(runs.checkpoint, base=NOT_QUANTIZED)

_EVERY_BATCH = Text("every batch size runs on the same compiled regions, so the model passes on as it is")
_EVERY_SIZE = Text("every size runs compiled, so the latent passes on as it is")
_NOTHING_QUANTIZED = Text("nothing is quantized: Load Diffusion Model (Faster Format) does that, and keeps it")
_ONE_COPY = Text("a compiled model uses ComfyUI's own weights, so there are no two copies to compare")
_NO_LOAD = Text("compiled regions are kept on disk by themselves, so there is no graph to load here")
_NO_SAVE = Text("compiled regions are kept on disk by themselves, so there is no graph to save here")
_SAVES_NOTHING = f"It saves nothing: {_NO_SAVE}. docs/servers.md says how to carry them elsewhere."


def _not_needed(
    node_id: str, title: str, reason: str, inputs: dict[str, Any], passes: str = "", description: str = ""
) -> OldNode:
    """passes: the input that the node passes on. description: the description, by default the reason."""
    outputs = {inputs[passes].io_type: inputs[passes]} if passes else {}
    run = partial(runs.pass_on, reason=reason, passes=passes)
    return OldNode(node_id, title, "", description or f"{reason[0].upper()}{reason[1:]}.", inputs, outputs, run)


TABLE = (
    # speed-up nodes
    OldNode(
        "ModelSpeedup", "Model Speedup", "Compile Model", f"{_AUTO}, and adds DeepCache if a booster asks for it.",
        {"model": io.Model, **_BOOSTER, "inplace": True}, _MODEL, runs.model,
    ),
    OldNode(
        "SVDSpeedup", "SVD Speedup", "Compile Model", f"{_AUTO}. A video model needs no node of its own.",
        {"model": io.Model, "inplace": False, "cache_name": "svd", **_BOOSTER}, _MODEL, runs.model,
    ),
    OldNode(
        "ModuleDeepCacheSpeedup", "Model DeepCache Speedup", _MODEL_AND_CACHE, _AS_CACHE,
        {"model": io.Model, "static_mode": _ON, **DEFAULTS}, _MODEL, runs.model,
    ),
    OldNode(
        "VaeSpeedup", "VAE Speedup", "Compile VAE Decode", "It compiles the decoder with the backend auto.",
        {"vae": io.Vae, **_BOOSTER, "inplace": True}, _VAE, runs.vae,
    ),
    OldNode(
        "ControlnetSpeedup", "ControlNet Speedup", "Compile ControlNet", f"{_AUTO}.",
        {"control_net": io.ControlNet, "inplace": True, **_BOOSTER}, _CONTROL_NET, runs.control_net,
    ),
    OldNode(  # of OneDiff's first versions, whose id has a capital N
        "ControlNetSpeedup", "ControlNet Speedup", "Compile ControlNet",
        f"{_AUTO}; with static_mode disable the ControlNet runs eagerly.",
        {"control_net": io.ControlNet, "static_mode": _ON}, {"control_net": io.ControlNet}, runs.control_net,
    ),
    # loaders
    OldNode(
        "OneDiffCheckpointLoaderSimple", "Load Checkpoint - OneDiff", _LOAD_CHECKPOINT,
        "It loads and compiles; vae_speedup compiles the VAE's decoder too.",
        {**_FILE, "vae_speedup": _OFF, **_BOOSTER}, _CHECKPOINT, runs.checkpoint,
    ),
    OldNode(
        "OneDiffDeepCacheCheckpointLoaderSimple", "Load Checkpoint - OneDiff DeepCache",
        f"{_LOAD_CHECKPOINT} and DeepCache", _AS_CACHE,
        {**_FILE, "vae_speedup": _OFF, "static_mode": _ON, **DEFAULTS}, _CHECKPOINT, runs.checkpoint,
    ),
    OldNode(
        "OneDiffControlNetLoader", "Load ControlNet Model - OneDiff", "Load ControlNet Model and Compile ControlNet",
        "It loads and compiles. A ControlLora runs eagerly, and the node says so.",
        {"control_net_name": Folder("controlnet"), **_BOOSTER}, _CONTROL_NET, runs.loaded_control_net,
    ),
    OldNode(
        "OneDiffQuantCheckpointLoaderSimple", "Load Checkpoint - OneDiff Quant", _LOAD_CHECKPOINT,
        "Nothing is quantized: the model is compiled in its own precision.",
        {**_FILE, "vae_speedup": _OFF}, _CHECKPOINT, _RUN_QUANTIZED,
    ),
    OldNode(
        "OneDiffQuantCheckpointLoaderSimpleAdvanced", "Load Checkpoint - OneDiff Quant Advanced", _LOAD_CHECKPOINT,
        _NO_MODEL_PATH, _QUANTIZED_FILE, _CHECKPOINT, _RUN_QUANTIZED,
    ),
    OldNode(
        "ImageOnlyOneDiffQuantCheckpointLoaderAdvanced", "Load Checkpoint - OneDiff Quant Advanced (img2vid)",
        "Image Only Checkpoint Loader and Compile Model",
        _NO_MODEL_PATH, _QUANTIZED_FILE, _VIDEO_CHECKPOINT, partial(_RUN_QUANTIZED, loader="ImageOnlyCheckpointLoader"),
    ),
    OldNode(
        "UNETLoaderInt8", "UNET Loader Int8", "Load Diffusion Model (Faster Format) and Compile Model",
        "Only OneDiff reads its int8 files, so this node stops the prompt and says which nodes to use.",
        {"model_path": ""}, _MODEL, runs.int8_model,
    ),
    # boosters, which pass a setting to a speed-up node
    OldNode(
        "OneDiffModelBooster", "Apply Model Booster - OneDiff", _MODEL_AND_CACHE,
        "The speed-up node that it is wired to compiles, and adds DeepCache if a DeepCache booster is wired here.",
        {
            "quantization_booster": QuantizationBooster,
            "deepcache_booster": DeepCacheBooster,
            "torchcompile_booster": TorchCompileBooster,
        },
        {"CUSTOM_BOOSTER": CustomBooster}, runs.booster,
    ),
    OldNode(
        "OneFlowDeepcacheBooster", "OneFlow Deepcache Booster - OneDiff", "DeepCache", _AS_CACHE,
        DEFAULTS, {"DeepCacheBooster": DeepCacheBooster}, runs.booster,
    ),
    OldNode(
        "OneDiffNexfortBooster", "Nexfort Booster - OneDiff", "Compile Model",
        "Nexfort's modes have no effect: the backend auto compiles.",
        {"fullgraph": False, "dynamic": True, "mode": "max-optimize:max-autotune:low-precision", "docs_link": ""},
        _FOR_BOOSTER, runs.booster,
    ),
    OldNode(
        "OneDiffTorchCompileBooster", "Torch Compile Booster - OneDiff", "Compile Model",
        "torch.compile's modes have no effect: the backend auto compiles. `disable` switches compiling off.",
        {
            "fullgraph": False, "dynamic": "", "backend": "inductor", "mode": "default", "disable": False,
            "docs_link": "",
        },
        _FOR_BOOSTER, runs.booster,
    ),
    OldNode(
        "OneDiffOnlineQuantizationBooster", "Online OneFlow Quantizer - OneDiff", "Compile Model without quantization",
        "Nothing is quantized: the model runs in the precision in which ComfyUI loaded it.",
        {
            "quantized_conv_percentage": 100, "quantized_linear_percentage": 100,
            "conv_compute_density_threshold": 100, "linear_compute_density_threshold": 300,
        },
        {"QuantizationBooster": QuantizationBooster}, partial(runs.booster, base=NOT_QUANTIZED),
    ),
    # nodes that have nothing to do any more
    _not_needed(
        "BatchSizePatcher", "Batch Size Patcher", _EVERY_BATCH,
        {"model": io.Model, "latent_image": io.Latent}, "model",
    ),
    _not_needed(
        "ResolutionSpeedupChecker", "Speedup Checker - Resolution", _EVERY_SIZE, {"samples": io.Latent}, "samples",
    ),
    *(
        _not_needed(
            node_id, title, _NO_LOAD, {name: kind, "graph": ""}, name, f"The {name} passes on as it is: {_NO_LOAD}.",
        )
        for node_id, title, name, kind in (
            ("ModelGraphLoader", "Model Graph Loader", "model", io.Model),
            ("VaeGraphLoader", "VAE Graph Loader", "vae", io.Vae),
            ("ControlNetGraphLoader", "ControlNet Graph Loader", "control_net", io.ControlNet),
        )
    ),
    *(
        _not_needed(
            node_id, title, _NO_SAVE, {**waits_for, name: kind, "filename_prefix": name}, description=_SAVES_NOTHING,
        )
        for node_id, title, waits_for, name, kind in (
            ("ModelGraphSaver", "Model Graph Saver", {"samples": io.Latent}, "model", io.Model),
            ("VaeGraphSaver", "VAE Graph Saver", {"images": io.Image}, "vae", io.Vae),
            ("ControlNetGraphSaver", "ControlNet Graph Saver", {"samples": io.Latent}, "control_net", io.ControlNet),
        )
    ),
    _not_needed(
        "Quant8Model", "Model Quantization(int8)", _NOTHING_QUANTIZED,
        {"model": io.Model, "output_dir": "int8", "conv": "enable", "linear": "enable"},
    ),
    _not_needed(
        "CompareModel", "Model Weight Comparator", _ONE_COPY,
        {"torch_model": io.Model, "oneflow_model": io.Model, "check": "enable"},
    ),
    OldNode(
        "ShowImageDiff", "Image Distinction Scanner", "Compare Images",
        "It measures how much two images differ, and can stop the prompt at a low SSIM.",
        # rtol and atol come last, because the newer version's workflows also store values by position.
        {
            "images1": io.Image, "images2": io.Image, "ssim_threshold": "0.9", "raise_if_diff": "enable",
            "image_id": "ComfyUI", "rtol": "", "atol": "",
        },
        {}, images.compare_images,
    ),
)  # fmt: skip
