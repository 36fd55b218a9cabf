"""The names in `transformer_options`, and the meaning of each. No other file of this pack spells one of these names.

ComfyUI and other packs put values there for a call of a model. A graph replays one call and a region one block, so a
value must not matter, or be part of a key. A name without a row here prevents a capture, and regions that read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Flag, auto
from typing import Any


class Meaning(Flag):
    """How the forward of a model, or of one block, uses an entry."""

    INERT = auto()  # nothing in a whole forward reads it except patches, so a graph may replay a call that has it
    PASSED_ON = auto()  # a block may pass it on, but must not use its value, which differs by block or by step
    KEYED = auto()  # a plain value that chooses what a block computes: part of a region's key
    PATCHES = auto()  # functions of other nodes, by kind
    OVERRIDE = auto()  # another node's attention
    NOISE_LEVEL = auto()  # a forward that reads it computes something else in each step, at equal shapes
    FRAMES = auto()  # which frames of a long video the call covers


_UNUSED = Meaning.INERT | Meaning.PASSED_ON

# The names that other files read or write individually.
ACTIVATIONS_SHAPE = "activations_shape"
BLOCK, BLOCK_INDEX, TRANSFORMER_INDEX = "block", "block_index", "transformer_index"
COND_ORDER = "cond_or_uncond"  # which parts of the batch are positive and which negative
CONTEXT_WINDOW, EVOLVED_WINDOW = "context_window", "ad_params"  # core's, and AnimateDiff-Evolved's
ORIGINAL_SHAPE = "original_shape"
OVERRIDE = "optimized_attention_override"
PATCHES, REPLACEMENTS = "patches", "patches_replace"
PREFETCH = "prefetch_dynamic_vbars"  # lets core load the next block's weights
SCHEDULE, SIGMAS = "sample_sigmas", "sigmas"  # the noise levels of the run, and of the call
UUIDS = "uuids"  # of the conds, in the order of the batch
# Ours: the StepPass of a call, and the StepCacheRun of a sampling run (see `step_pass`).
STEP_PASS, STEP_CACHE_RUN = "resolute_step_pass", "resolute_step_cache"

MEANINGS: Mapping[str, Meaning] = {
    ACTIVATIONS_SHAPE: _UNUSED,
    BLOCK: _UNUSED,
    BLOCK_INDEX: _UNUSED,
    COND_ORDER: _UNUSED,  # but see `may_read_cond_order`
    CONTEXT_WINDOW: Meaning.FRAMES,
    EVOLVED_WINDOW: Meaning.FRAMES,
    ORIGINAL_SHAPE: _UNUSED,
    OVERRIDE: Meaning.OVERRIDE,
    PATCHES: Meaning.PATCHES,
    PREFETCH: _UNUSED,
    REPLACEMENTS: Meaning.PATCHES,
    SCHEDULE: _UNUSED | Meaning.NOISE_LEVEL,
    SIGMAS: _UNUSED | Meaning.NOISE_LEVEL,
    STEP_CACHE_RUN: Meaning.INERT,
    STEP_PASS: Meaning.INERT,
    TRANSFORMER_INDEX: _UNUSED,
    UUIDS: _UNUSED,
    "a2v_cross_attn": Meaning.KEYED,
    "block_type": Meaning.KEYED,
    "callbacks": _UNUSED,
    "easycache": Meaning.INERT,
    "grid_sizes": Meaning.PASSED_ON,
    "img_slice": Meaning.PASSED_ON,
    "multigpu_thread_device": _UNUSED,
    "reference_image_num_tokens": Meaning.PASSED_ON,
    "run_ax": Meaning.KEYED,
    "run_vx": Meaning.KEYED,
    "stg_skip_self_attn": Meaning.KEYED,
    "total_blocks": _UNUSED,
    "v2a_cross_attn": Meaning.KEYED,
    "wrappers": _UNUSED,
}

_PATCHED = (PATCHES, REPLACEMENTS)
# Kinds of patches that act inside core's transformer blocks: those of PATCHES, and those of REPLACEMENTS.
_ATTENTION_PATCHES = ("attn1_patch", "attn1_output_patch", "attn2_patch", "attn2_output_patch", "middle_patch")
_ATTENTION_REPLACEMENTS = ("attn1", "attn2")


def names_of(meaning: Meaning) -> frozenset[str]:
    """The names that have at least one of these meanings."""
    return frozenset(name for name, meanings in MEANINGS.items() if meanings & meaning)


_KNOWN_IN_A_FORWARD = names_of(Meaning.INERT | Meaning.PATCHES)


def patches_in(options: Mapping[str, Any]) -> list[str]:
    """The kinds of the patches in a call's options, or of the replacements if it has no patches."""
    filled = (sorted(kind for kind, given in (options.get(name) or {}).items() if given) for name in _PATCHED)
    return next((kinds for kinds in filled if kinds), [])


def unknown_in(options: Mapping[str, Any]) -> list[str]:
    """The entries that may change what a whole forward computes, besides patches, sorted."""
    return sorted(str(name) for name in options if name not in _KNOWN_IN_A_FORWARD)


def patches_of_attention(options: Mapping[str, Any]) -> list[str]:
    """The kinds of the patches, or else of the replacements, inside the block that the options name."""
    patches = options.get(PATCHES) or {}
    found = [kind for kind in _ATTENTION_PATCHES if patches.get(kind)]
    block = options.get(BLOCK)
    if found or block is None:
        return found
    here, replaced = {block, (*block, options.get(BLOCK_INDEX, 0))}, options.get(REPLACEMENTS) or {}
    return [kind for kind in _ATTENTION_REPLACEMENTS if here & set(replaced.get(kind) or ())]
