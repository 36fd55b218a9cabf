"""Writes the families of docs/models.md: what Resolute does with each model class of ComfyUI's `supported_models.py`.

``python -m scripts.commands.family_table --comfyui FOLDER``, in an environment with torch. It builds the networks
without weights, but for those in BY_HAND. Nothing runs.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import re
import sys
from pathlib import Path
from typing import Any

import torch

from .. import pack
from ..places import ROOT

PAGE = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- family_table -->", "<!-- end of family_table -->"
_PREFIX = "comfy.ldm."
UNET = "modules.diffusionmodules.openaimodel.UNetModel"

# For networks without settings of their own: those that ComfyUI's detection of models finds.
SETTINGS: dict[str, dict[str, Any]] = {
    "cosmos.model.GeneralDIT": {
        "max_img_h": 240, "max_img_w": 240, "max_frames": 128, "in_channels": 17, "out_channels": 16,
        "patch_spatial": 2, "patch_temporal": 1, "model_channels": 4096, "num_blocks": 28, "num_heads": 32,
        "crossattn_emb_channels": 1024, "pos_emb_cls": "rope3d", "block_config": "FA-CA-MLP",
        "affline_emb_norm": True, "use_adaln_lora": True, "adaln_lora_dim": 256, "extra_per_block_abs_pos_emb": True,
        "extra_per_block_abs_pos_emb_type": "learnable",
    },
    "genmo.joint_model.asymm_models_joint.AsymmDiTJoint": {
        "depth": 48, "patch_size": 2, "num_heads": 24, "hidden_size_x": 3072, "hidden_size_y": 1536, "mlp_ratio_x": 4.0,
        "mlp_ratio_y": 4.0, "in_channels": 12, "qk_norm": True, "qkv_bias": False, "out_bias": True,
        "patch_embed_bias": True, "timestep_mlp_bias": True, "timestep_scale": 1000.0, "t5_feat_dim": 4096,
        "t5_token_length": 256, "rope_theta": 10000.0,
    },
}  # fmt: skip
# Networks that cannot be built from settings that they have themselves, with the blocks in their lists.
BY_HAND = {
    "ace.ace_step15.AceStepConditionGenerationModel": ["AceStepDiTLayer"],
    "anima.model.Anima": ["Block"],
    "chroma.model.Chroma": ["DoubleStreamBlock", "SingleStreamBlock"],
    "chroma_radiance.model.ChromaRadiance": ["DoubleStreamBlock", "SingleStreamBlock", "NerfGLUBlock"],
    "cosmos.predict2.MiniTrainDIT": ["Block"],
    "flux.model.Flux": ["DoubleStreamBlock", "SingleStreamBlock"],
    "hidream.model.HiDreamImageTransformer2DModel": ["HiDreamImageBlock"],
    "hunyuan_video.model.HunyuanVideo": ["DoubleStreamBlock", "SingleStreamBlock"],
    UNET: [],
    "seedvr.model.NaDiT": ["NaMMSRTransformerBlock"],
}

# Networks whose blocks run eagerly, or that no sampler calls, and why.
LEFT_ALONE = {
    "seedvr.model.NaDiT": "its blocks pass on what they computed in a Cache; the node says so",
    "wan.ar_model.CausalWanModel": "its blocks keep keys and values of earlier frames in the caller's lists",
    "rt_detr.rtdetr_v4.RTv4": "nothing samples with it",
    "depth_anything_3.model.DepthAnything3Net": "nothing samples with it",
    "sam3.detector.SAM3Model": "nothing samples with it",
}

_UNETS = "UNets (residual and transformer blocks, also those over time)"
_TEXT = """**Catalogued**, as ComfyUI {version} names their classes. Tests compare each with eager at many sizes.

{catalogued}

**Recognised:** the largest lists of equal modules become regions. Tests run three of them (Kandinsky 5, Lens, Ideogram
4): no later size compiles anything. PixelDiT compiles again at a new number of tokens.
They are {recognised}.

**Captured whole**, without repeated blocks: {whole}.

**Left alone:** {left}.
"""


def page() -> str:
    """The page with its families written anew. ComfyUI must be importable."""
    before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    return f"{before}{BEGIN}\n\n{_section()}\n{END}{rest.partition(END)[2]}"


def _section() -> str:
    known = _catalogued()
    left, listed = [], dict[str, list[str]](recognised=[], whole=[])
    catalogued: dict[str, list[str]] = {}
    for network, names in _networks().items():
        if network in known or network == UNET:
            catalogued.setdefault(known.get(network, _UNETS), []).extend(names)
        elif network in LEFT_ALONE:
            left.append(f"{', '.join(names)} ({LEFT_ALONE[network]})")
        else:
            listed["recognised" if _blocks(network) else "whole"] += names
    source = Path(importlib.import_module("comfy").__path__[0]).parent / "comfyui_version.py"
    (version,) = re.findall(r'__version__ = "([\d.]+)"', source.read_text(encoding="utf-8"))
    rows = "\n".join(f"- {name}: {', '.join(names)}" for name, names in catalogued.items())
    texts = {what: ", ".join(each) for what, each in listed.items()}
    return _TEXT.format(version=version, catalogued=rows, left=", ".join(left), **texts)


def _catalogued() -> dict[str, str]:
    return {
        network: family.name
        for family in pack.module("nodes.adapters.blocks.transformers.catalogue").FAMILIES
        for network in family.networks
    }


def _networks() -> dict[str, list[str]]:
    """The names of the model classes by their network."""
    supported: Any = importlib.import_module("comfy.supported_models")
    bases: Any = importlib.import_module("comfy.model_base")
    found: dict[str, list[str]] = {}
    base = supported.supported_models_base.BASE
    for name, kind in vars(supported).items():
        if not isinstance(kind, type) or not issubclass(kind, base) or kind.__module__ != supported.__name__:
            continue
        makes: Any = vars(supported)[name].get_model
        (made, *_) = re.findall(r"model_base\.(\w+)\(", inspect.getsource(makes)) or ["BaseModel"]
        found.setdefault(_network(getattr(bases, made)), []).append(name)
    return found


def _network(base: type) -> str:
    """The class that a model class of model_base builds by default."""
    for each in base.__mro__:
        made: Any = vars(each).get("__init__")
        default = inspect.signature(made).parameters.get("unet_model") if inspect.isfunction(made) else None
        if default is not None and default.default is not inspect.Parameter.empty:
            return _short(default.default)
        given = re.search(r"unet_model=([\w.]+)", inspect.getsource(made) if inspect.isfunction(made) else "")
        if given is not None and given.group(1) != "unet_model":
            value: Any = sys.modules[each.__module__]
            for part in given.group(1).split("."):
                value = getattr(value, part)
            return _short(value)
    return UNET


def _short(network: Any) -> str:
    return f"{network.__module__}.{network.__qualname__}".removeprefix(_PREFIX)


def _blocks(network: str) -> list[str]:
    """The classes of the repeated blocks that recognition finds in a network."""
    if network in BY_HAND:
        return BY_HAND[network]
    module, _, name = network.rpartition(".")
    kind = getattr(importlib.import_module(_PREFIX + module), name)
    operations = importlib.import_module("comfy.ops").disable_weight_init
    made = kind(**SETTINGS.get(network, {}), dtype=torch.float32, device="meta", operations=operations)
    blocks = pack.module("nodes.adapters.blocks.transformers.recognise").repeated_blocks(made)
    return list(dict.fromkeys(type(block).__name__ for _, block in blocks))


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m scripts.commands.family_table", description=__doc__)
    parser.add_argument("--comfyui", type=Path, default=ROOT / ".comfyui")
    options = parser.parse_args(arguments)
    sys.path.insert(0, str(options.comfyui))
    importlib.import_module("comfy.cli_args").args.cpu = True
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
