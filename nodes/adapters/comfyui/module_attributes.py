"""The attributes that ComfyUI stores on its modules."""

from __future__ import annotations

from ....compile_cache.attribute_policy import ModuleAttributePolicy
from ....compile_cache.modules.gguf_weights import is_gguf_class
from ..trust.core_code import is_quantized
from ..trust.packs import sources_of
from ..trust.trust import is_trusted

_PAGING = frozenset(  # of DynamicVRAM
    {
        "_v", "_v_block", "_v_block_faulted", "_v_signature", "_v_weight", "_v_bias",
        "_pins", "_pin_state", "_prefetch", "_comfy_graph", "comfy_cast_weights",
        "weight_lowvram_function", "bias_lowvram_function", "dynamic_vbars", "dynamic_pins", "dynamic_patchers",
    }
)  # fmt: skip
WEIGHT_PATCHES = ("weight_function", "bias_function")
CASTS = "comfy_cast_weights"  # changes the computation; its effect is in the region key


def _knows_layout(kind: type) -> bool:
    return is_quantized(kind) or (is_gguf_class(kind) and is_trusted(kind))


ATTRIBUTES = ModuleAttributePolicy(
    bookkeeping=_PAGING
    | {
        "prev_comfy_cast_weights",
        "comfy_patched_weights",
        "seed_key",
        "comfy_need_lazy_init_bias",
        "largest_layer",  # ComfyUI-GGUF's, for its memory estimate
        *WEIGHT_PATCHES,
    },
    # Core stores the dtype of a loaded weight under such a name. A digest includes the weight's own dtype.
    bookkeeping_endings=("_comfy_model_dtype",),
    # Only a load without paging sets the first, as for a model with LoRA hooks. Core's mixed precision Linears read it.
    switch=("comfy_force_cast_weights", "_full_precision_mm"),
    casts=CASTS,
    weight_patches=WEIGHT_PATCHES,
    sources=sources_of,
    knows_layout=_knows_layout,
)
