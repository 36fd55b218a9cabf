"""Predicates that recognise ComfyUI's own classes and functions: blocks, forwards and samplers of core."""

from __future__ import annotations

import functools
import inspect
import sys
from pathlib import Path
from types import FunctionType
from typing import Any

import torch

from ....compile_cache.code_identity.authors import author_of, is_written_by, is_written_for
from ....compile_cache.code_identity.names import full_name, module_of, origin

_COMFYUI = "comfy"
# The only one of core's models that reads which parts of the batch are positive and which negative.
_READS_COND_ORDER = "comfy.ldm.seedvr.model"

# Block patches of core's nodes that write to nothing but their results, and the file of each.
_PATCHES = {
    "KV_Attn_Input.__call__": "comfy_extras/nodes_flux.py",
    "NAGuidance.execute.<locals>.nag_attention_output_patch": "comfy_extras/nodes_nag.py",
}


def is_core(module: torch.nn.Module, where: str, name: str) -> bool:
    """The module's class is exactly `name` of ComfyUI's module `where`, and the module has the forward of that class.

    A subclass, or a forward that another pack replaced, may compute anything.
    """
    kind = type(module)
    return is_core_class(kind, where, name) and "forward" not in vars(module) and is_core_function(kind.forward, where)


def is_core_class(kind: type, where: str, name: str) -> bool:
    return kind.__name__ == name and module_of(kind) == where


def derives_from(module: torch.nn.Module, *where: str) -> bool:
    """The class of the module, or one of its base classes, was written in one of these modules of ComfyUI's."""
    return any(module_of(kind) in where for kind in type(module).__mro__)


def is_of_core(code: Any) -> bool:
    return origin(code) == _COMFYUI


def core_name(kind: type) -> str:
    """The full name of one of ComfyUI's classes, for tables; empty for other classes."""
    return full_name(kind) if is_of_core(kind) else ""


def is_plain_layer(kind: type) -> bool:
    """The class is a layer of torch's, or one of core's layers that cast their weights: no block of a model."""
    return module_of(kind).startswith(("torch.", "comfy.ops"))


def is_quantized(kind: type) -> bool:
    """The class is core's class of quantized weights, which comfy-kitchen wrote."""
    return kind.__name__ == "QuantizedTensor" and origin(kind) in (_COMFYUI, "comfy_kitchen")


def is_core_function(function: Any, where: str) -> bool:
    """The function was written in ComfyUI's module `where`; its name does not matter."""
    return is_written_by(function, where)


def is_known_forward(module: torch.nn.Module, forward: Any) -> bool:
    """The forward is the module's own method, by its class's author or by torch: TAESD's decoder is a Sequential."""
    own = inspect.ismethod(forward) and forward.__self__ is module
    return own and is_written_for(forward.__func__, type(module), ("torch",))


def is_patch_of_core(patch: Any) -> bool:
    """The patch is listed in `_PATCHES`: a block may be cut around it."""
    function = patch if isinstance(patch, FunctionType) else vars(type(patch)).get("__call__")
    name = _PATCHES.get(function.__qualname__) if isinstance(function, FunctionType) else None
    return name is not None and _file(author_of(function)) == _file("comfy.model_management").parents[1] / name


def _file(module: str) -> Path:
    return _resolved(getattr(sys.modules.get(module), "__file__", None) or "")


@functools.cache
def _resolved(file: str) -> Path:
    return Path(file).resolve()  # asks the file system for each folder


def may_read_cond_order(kind: type) -> bool:
    """A model of this class may read which parts of the batch are positive. Any other pack's model may."""
    return module_of(kind) == _READS_COND_ORDER or not is_of_core(kind)
