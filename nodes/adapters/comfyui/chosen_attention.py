"""Which attention a call uses: torch's, another one of core's by its name, or another pack's.

The user chooses by a start option, by core's node ModelAttentionBackend, or by a pack that sets one of core's functions
on a model. Core registers its functions by name. A declared pack may add functions (KJNodes' for SageAttention); their
names include a digest of their content.
"""

from __future__ import annotations

import functools
import importlib
import types
from collections import ChainMap
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch

from ....compile_cache.attention import chosen
from ....compile_cache.code_identity.authors import author_of
from ....compile_cache.code_identity.names import module_of, name_of_class
from ....compile_cache.modules.slots import all_parts
from ..trust.trust import attention_of_pack
from .transformer_options import OVERRIDE

TORCHS = "pytorch"  # also stands for core's plain-torch equivalents, which slice by free memory
_PLAIN = frozenset({TORCHS, "sub_quad", "split", "basic"})
_NODES = "ModelPatcher.set_model_optimized_attention.<locals>.optimized_attention_override"


def attention_of(options: Mapping[str, Any]) -> str | None:
    """The name of the attention of a call; None for an unknown function of another pack.

    options: the transformer_options of the call.
    """
    override = options.get(OVERRIDE)
    if override is None:
        return default()
    return _name_of(_given_to_model(override)) or _of_declared_pack(override)


def why_unknown(options: Mapping[str, Any]) -> str:
    """Why the attention of a call is unknown, a sentence without its full stop."""
    if options.get(OVERRIDE) is None:
        own = _core().optimized_attention
        is_function = isinstance(own, types.FunctionType)  # a wrapper may have copied the name of core's
        name = f"{module_of(own)}.{own.__code__.co_name}" if is_function else name_of_class(type(own))
        return f"another pack put {name} in the place of ComfyUI's attention"
    why = attention_of_pack(options.get(OVERRIDE))[1]
    return f"another node overrides attention ({why})" if why else "another node overrides attention"


def default() -> str | None:
    """The name of the attention of calls that choose none; None if another pack replaced core's."""
    return _name_of(_core().optimized_attention)


def of_file(block: torch.nn.Module) -> str:
    """The attention that the model's file chose for a part of the block; empty if it chose none.

    Core keeps it in a `ComfyAttention` (after ComfyUI 0.33). An override takes precedence, and a trace overrides
    attention, so the trace would lose this choice.
    """
    holder = vars(_core()).get("ComfyAttention")
    held = [] if holder is None else [part for part in all_parts(block) if isinstance(part, holder)]
    found = next((each for part in held if (each := getattr(part, "function", None)) is not None), None)
    return "" if found is None else _name_of(found) or "another function"


def functions() -> Mapping[str, Callable[..., torch.Tensor]]:
    """A live view of core's registered functions by name, and of the functions of declared packs that were used.

    Empty before core registers any.
    """
    cores: MutableMapping[str, Callable[..., torch.Tensor]] = getattr(_core(), "REGISTERED_ATTENTION_FUNCTIONS", {})
    return ChainMap(_of_packs, cores)


def run(name: str, function: Any, q: Any, k: Any, v: Any, heads: int, mask: Any = None, **given: Any) -> torch.Tensor:
    """Core's function of this name as one operator, in place of `function`: an `optimized_attention_override`.

    q, k, v, given: as for core's functions. No block passes any argument of theirs that the operator lacks.
    """
    return chosen.operator()(
        q, k, v, name, heads, mask,
        bool(given.get("skip_reshape", False)), bool(given.get("skip_output_reshape", False)), given.get("scale"),
        bool(given.get("enable_gqa", False)), given.get("low_precision_attention", True) is not False,
    )  # fmt: skip


def _given_to_model(override: Any) -> Any:
    """The function of core's that core's own override calls; None for any other override."""
    # Check only who wrote the override: `_name_of` looks up the function in its closure.
    is_cores = isinstance(override, types.FunctionType) and author_of(override) == "comfy.model_patcher"
    if not is_cores or override.__qualname__ != _NODES or override.__closure__ is None:
        return None
    cells = dict(zip(override.__code__.co_freevars, override.__closure__, strict=True))
    return cells["optimized_attention"].cell_contents if "optimized_attention" in cells else None


_of_packs: dict[str, Callable[..., torch.Tensor]] = {}


def _of_declared_pack(override: Any) -> str | None:
    name, _ = attention_of_pack(override)
    if not name:
        return None
    cores = vars(_core()).get(f"attention_{name}")
    if cores is not None:
        return _name_of(cores)
    if name not in _of_packs:
        _of_packs[name] = functools.partial(override, _core().optimized_attention)
    return name


def _name_of(function: Any) -> str | None:
    if function is None:
        return None
    name = next((name for name, each in functions().items() if each is function), None)
    if name is None:  # a start option may choose a function that this version does not register
        own = vars(_core()).get(getattr(function, "__name__", ""))
        return TORCHS if own is function and own.__name__.removeprefix("attention_") in _PLAIN else None
    return TORCHS if name in _PLAIN else name


def _core() -> Any:
    return importlib.import_module("comfy.ldm.modules.attention")


# At import, since a region loaded from disk runs the operator without a trace.
chosen.use(__name__, lambda name: functions().get(name))
