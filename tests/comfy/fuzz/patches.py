"""The nodes that a workflow may have between loader and sampler, with the bypasses that each may cause."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..rig import node

_PATCHED = frozenset({"patched_block"})

# The kinds of ResoluteTestPatch by their effect; a test checks that these lists match the test pack.
INSIDE_BLOCKS = (
    "attn1_patch",
    "attn2_patch",
    "attn1_output_patch",
    "attn2_output_patch",
    "middle_patch",
    "attn1_replace",
    "attn2_replace",
    "attention_override",
    "masked_attention",
)
OUTSIDE_BLOCKS = (
    "input_block_patch",
    "input_block_patch_after_skip",
    "output_block_patch",
    "middle_block_after_patch",
    "emb_patch",
    "forward_timestep_embed_patch",
    "apply_model_wrapper",
    "diffusion_model_wrapper",
)
REPLACED = ("replaced_forward",)
SOME_STEPS = ("patched_for_some_steps", "changed_inside_for_some_steps")
# The kinds of ResoluteTestGlobalState, which changes something for the whole process while its model samples, with the
# bypasses that each causes. FLAGS are part of a region's key, so each of them compiles regions once; NVIDIA_FLAGS only
# on CUDA, because nothing else reads them.
NVIDIA_FLAGS = ("fp16 accumulation",)
FLAGS = ("deterministic", "no flash attention", *NVIDIA_FLAGS)
GLOBAL_STATES = {
    **{kind: frozenset[str]() for kind in FLAGS},
    "autocast": frozenset({"observed_input"}),
    "exchanged attention": frozenset({"replaced_forward"}),
    "exchanged torch attention": frozenset({"replaced_forward"}),
    "exchanged activation": frozenset({"replaced_forward"}),
    "exchanged embedding": frozenset({"replaced_forward"}),
    "exchanged method": frozenset({"replaced_forward"}),
    "assigned code": frozenset({"replaced_forward"}),
    "global hook": frozenset({"replaced_forward"}),
}
# The same without another object in the place of one. Which regions there are depends on the order of such nodes.
INSIDE = {
    "number of numpy": frozenset[str](),
    "another number of numpy": frozenset[str](),
    "number of a pack": frozenset[str](),
    "class of a layer": frozenset({"replaced_forward", "observed_input", "foreign_model"}),
    "other defaults": frozenset({"replaced_forward"}),
}
# Left out, because other tests cover them: the first affects all later prompts, the second never runs compiled.
LEFT_OUT = ("changed_in_place", "exchanged_network")

CHOSEN_ATTENTION = "ResoluteTestAttention"

# The inputs of nodes that need a second model or an empty prompt; see `Workflow`.
OTHER_MODEL = ["other-model", 0]
NEGATIVE = ["negative", 0]


@dataclass(frozen=True)
class Patch:
    """A node MODEL -> MODEL without its model input.

    bypasses: codes that it may cause. decides: it compares numbers, so two correct results may differ if the numbers
    are almost equal. counts_calls: its image depends on whether conditions are merged into one call. input: name of
    its model input. runs_as_is: calls of the model may run without any region.
    """

    node: dict[str, Any]
    bypasses: frozenset[str] = field(default_factory=frozenset)
    decides: bool = False
    counts_calls: bool = False
    input: str = "model"
    runs_as_is: bool = False


def _step_cache(class_type: str) -> Patch:
    numbers = {"reuse_threshold": 0.5, "start_percent": 0.1, "end_percent": 0.9, "verbose": False}
    return Patch(node(class_type, **numbers), decides=True, counts_calls=True)


def _lora(class_type: str, file: str, strength: float, *bypasses: str) -> Patch:
    made = node(class_type, lora_name=f"{file}.safetensors", strength_model=strength)
    return Patch(made, frozenset(bypasses))


def _windows() -> Patch:
    """Core's context windows over the batch, as it is used for frames."""
    inputs = {"context_length": 2, "context_overlap": 1, "context_schedule": "standard_static", "context_stride": 1}
    inputs |= {"closed_loop": False, "fuse_method": "pyramid", "dim": 0, "freenoise": False}
    return Patch(
        node(
            "ContextWindowsManual",
            **inputs,
            cond_retain_index_list="",
            split_conds_to_windows=False,
            latent_retain_index_list="",
            causal_window_fix=True,
        )
    )


_DEEP_SHRINK = node(
    "PatchModelAddDownscale",
    block_number=2,
    downscale_factor=2.0,
    start_percent=0.0,
    end_percent=0.5,
    downscale_after_skip=True,
    downscale_method="bilinear",
    upscale_method="bilinear",
)

_HYPER_TILE = node("HyperTile", tile_size=64, swap_size=2, max_depth=1, scale_depth=False)

PATCHES: dict[str, Patch] = {
    # Core's nodes around the model, and between its blocks.
    # Without momentum, because the node carries its average over from a cancelled prompt to the next one.
    "APG": Patch(node("APG", eta=0.5, norm_threshold=5.0, momentum=0.0)),
    "CFGNorm": Patch(node("CFGNorm", strength=1.0, pre_cfg=False)),
    "CFGZeroStar": Patch(node("CFGZeroStar")),
    "ContextWindowsManual": _windows(),
    "DifferentialDiffusion": Patch(node("DifferentialDiffusion", strength=1.0), decides=True),
    "EasyCache": _step_cache("EasyCache"),
    "Epsilon Scaling": Patch(node("Epsilon Scaling", scaling_factor=1.1)),
    "FreSca": Patch(node("FreSca", scale_low=1.0, scale_high=1.5, freq_cutoff=4)),
    "FreeU": Patch(node("FreeU", b1=1.5, b2=1.6, s1=0.7, s2=0.3)),
    "FreeU_V2": Patch(node("FreeU_V2", b1=1.5, b2=1.6, s1=0.7, s2=0.3)),
    "LazyCache": _step_cache("LazyCache"),
    "Mahiro": Patch(node("Mahiro")),
    "PatchModelAddDownscale": Patch(_DEEP_SHRINK),
    "PerpNeg": Patch(node("PerpNeg", empty_conditioning=NEGATIVE, neg_scale=1.0)),
    "RescaleCFG": Patch(node("RescaleCFG", multiplier=0.8)),
    "TCFG": Patch(node("TCFG")),
    # How a step is computed from the model's answer.
    "ModelSamplingContinuousEDM": Patch(
        node("ModelSamplingContinuousEDM", sampling="v_prediction", sigma_max=20.0, sigma_min=0.03)
    ),
    "ModelSamplingDiscrete": Patch(node("ModelSamplingDiscrete", sampling="v_prediction", zsnr=False)),
    # Other weights, and other ways of computing with them.
    "ModelComputeDtype": Patch(node("ModelComputeDtype", dtype="fp32")),
    "ModelMergeSimple": Patch(node("ModelMergeSimple", model2=OTHER_MODEL, ratio=0.6), input="model1"),
    "UNetCrossAttentionMultiply": Patch(node("UNetCrossAttentionMultiply", q=1.2, k=1.0, v=1.2, out=1.0)),
    "UNetSelfAttentionMultiply": Patch(node("UNetSelfAttentionMultiply", q=1.0, k=1.1, v=0.9, out=1.2)),
    "lora a": _lora("LoraLoaderModelOnly", "fuzz-a", 0.8),
    "lora b": _lora("LoraLoaderModelOnly", "fuzz-b", -0.5),
    "lora beside": _lora("LoraLoaderBypassModelOnly", "fuzz-b", 0.6, "replaced_forward"),
    # Attention of core's that a person chose: another one of a name is part of a region's key.
    "ModelAttentionBackend": Patch(node("ModelAttentionBackend", attention="pytorch attention")),
    CHOSEN_ATTENTION: Patch(node(CHOSEN_ATTENTION)),
    # As on a machine with little memory.
    "ResoluteTestFreeMemory": Patch(node("ResoluteTestFreeMemory", from_step=1)),
    "ResoluteTestLowVRAM": Patch(node("ResoluteTestLowVRAM", kilobytes_outside=2000), frozenset({"streamed_weights"})),
    # Core's nodes inside transformer blocks.
    "HyperTile": Patch(
        node("HyperTile", tile_size=64, swap_size=2, max_depth=1, scale_depth=False), _PATCHED, counts_calls=True
    ),
    "NAGuidance": Patch(node("NAGuidance", nag_scale=3.0, nag_alpha=0.5, nag_tau=1.5), _PATCHED, counts_calls=True),
    "PerturbedAttentionGuidance": Patch(node("PerturbedAttentionGuidance", scale=2.0), _PATCHED),
    "SelfAttentionGuidance": Patch(node("SelfAttentionGuidance", scale=0.5, blur_sigma=2.0), _PATCHED, True, True),
    "TomePatchModel": Patch(node("TomePatchModel", ratio=0.3), _PATCHED, True, True),
    # Resolute's own nodes; the last of two Compile Model nodes decides.
    "ResoluteCompileModel": Patch(node("ResoluteCompileModel", backend="eager", batching="auto")),
    "ResoluteFree": Patch(node("ResoluteFree"), input="any"),
    **{kind: Patch(node("ResoluteTestPatch", kind=kind)) for kind in OUTSIDE_BLOCKS},
    **{kind: Patch(node("ResoluteTestPatch", kind=kind), _PATCHED) for kind in INSIDE_BLOCKS},
    **{kind: Patch(node("ResoluteTestPatch", kind=kind), frozenset({"replaced_forward"})) for kind in REPLACED},
    **{
        kind: Patch(
            node("ResoluteTestPatch", kind=kind), frozenset({"replaced_forward", "observed_input"}), runs_as_is=True
        )
        for kind in SOME_STEPS
    },
    **{
        kind: Patch(node("ResoluteTestGlobalState", kind=kind), codes, runs_as_is=kind in ("global hook", "autocast"))
        for kind, codes in GLOBAL_STATES.items()
    },
    **{
        kind: Patch(node("ResoluteTestGlobalState", kind=kind), codes, runs_as_is=True)
        for kind, codes in INSIDE.items()
    },
}
CHANGE_WEIGHTS = frozenset(
    {"ModelMergeSimple", "UNetCrossAttentionMultiply", "UNetSelfAttentionMultiply", "lora a", "lora b"}
)
# A bug of core's DynamicVRAM: each load puts the buffers of the last load back by their names, so a model_sampling that
# a node exchanged gets the sigmas of the one before it, and the next prompt has another schedule
# (benchmarks/results/README.md, ComfyUI's tests).
WRONG_WITH_PAGES = ("ModelSamplingContinuousEDM",)
# A bug of core: a model that was cast once (ModelComputeDtype) loses its LoRAs at its next partial load.
NEVER_TOGETHER = ("ModelComputeDtype", "ResoluteTestLowVRAM")
OURS = ("ResoluteCompileModel", "ResoluteFree")
