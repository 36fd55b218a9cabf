"""Torch's flags and contexts that change the result of the same call. Only this module reads and sets them.

A node may set one of them for a single prompt (KJNodes' Model Patch Torch Settings sets `allow_fp16_accumulation`). A
capture keeps the kernels that were chosen under its flags, and a traced region keeps autocast's casts and the choice of
an attention kernel, so the flags are part of the key of both. They are not part of the environment's fingerprint: the
store keeps regions for several sets of flags side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from ..keys import Component, Literal
from .private_names import DeviceContext, dispatch_mode_stack, function_mode_stack, mkldnn_enabled

Read = Callable[[], Literal]

_backends = torch.backends
_matmul = torch.backends.cuda.matmul


def _float32_precision(switch: Any, allow_tf32: Callable[[], bool]) -> Read:
    """torch 2.9 and newer have `fp32_precision`; once a program has set it, reading `allow_tf32` raises."""
    if not hasattr(switch, "fp32_precision"):
        return lambda: allow_tf32()

    def precision() -> str:
        own: str = switch.fp32_precision
        general: str = getattr(_backends, "fp32_precision", "none") if own == "none" else own
        return "ieee" if general == "none" else general

    return precision


# Keyed by the name that users see when a flag explains a capture miss.
_EVERYWHERE: dict[str, Read] = {
    "default dtype": lambda: str(torch.get_default_dtype()),
    "default device": lambda: _default_device(),
    "deterministic algorithms": lambda: torch.get_deterministic_debug_mode(),  # 0 off, 1 warn, 2 error
    "flash attention": _backends.cuda.flash_sdp_enabled,
    "math attention": _backends.cuda.math_sdp_enabled,
}
_ON_CUDA: dict[str, Read] = {
    "float32 matmul": _float32_precision(_matmul, lambda: _matmul.allow_tf32),
    "float32 convolution": _float32_precision(
        getattr(_backends.cudnn, "conv", None), lambda: _backends.cudnn.allow_tf32
    ),
    "fp16 accumulation": lambda: getattr(_matmul, "allow_fp16_accumulation", False),
    "fp16 reduction": lambda: str(_matmul.allow_fp16_reduced_precision_reduction),
    "bf16 reduction": lambda: str(_matmul.allow_bf16_reduced_precision_reduction),
    "cudnn": lambda: (_backends.cudnn.enabled, _backends.cudnn.benchmark, _backends.cudnn.deterministic),
    "memory-efficient attention": _backends.cuda.mem_efficient_sdp_enabled,
    "cudnn attention": _backends.cuda.cudnn_sdp_enabled,
    "reduced-precision math attention": _backends.cuda.fp16_bf16_reduction_math_sdp_allowed,
}
_ON_CPU: dict[str, Read] = {
    "onednn": mkldnn_enabled,
    "float32 matmul": _float32_precision(
        getattr(_backends.mkldnn, "matmul", None), lambda: torch.get_float32_matmul_precision() != "highest"
    ),
}
_OF_ATTENTION = {
    "flash attention", "math attention", "memory-efficient attention", "cudnn attention",
    "reduced-precision math attention",
}  # fmt: skip
_OF_MATMUL = {
    "allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction", "allow_fp16_accumulation",
}  # fmt: skip
_FLAGS = {
    "cuda": tuple({**_EVERYWHERE, **_ON_CUDA}.items()),
    "cpu": tuple({**_EVERYWHERE, **_ON_CPU}.items()),
}


def torch_flags(device_type: str) -> tuple[Component, ...]:
    """Return the current flags, by name, for a call on this type of device ("cuda", "cpu").

    Two calls with the same flags and the same inputs compute the same numbers. Reading them takes some microseconds.
    """
    flags = _FLAGS.get(device_type, _FLAGS["cuda"])
    return (*((name, read()) for name, read in flags), ("autocast", autocast_state(device_type)))


def without_attention(flags: Iterable[Component]) -> tuple[Component, ...]:
    """Return these flags without the switches that only attention reads."""
    return tuple([flag for flag in flags if flag[0] not in _OF_ATTENTION])


def autocast_state(device_type: str) -> str:
    """Return the dtype that autocast casts to on this type of device; "off" if autocast is disabled."""
    if not torch.is_autocast_enabled(device_type):
        return "off"
    return str(torch.get_autocast_dtype(device_type))


def _default_device() -> str | None:
    """Return the device of `torch.set_default_device` or `with torch.device(...)`, which are modes; None outside."""
    for mode in reversed(function_mode_stack()):
        if isinstance(mode, DeviceContext):
            return str(mode.device)
    return None


def intercepting_mode() -> str | None:
    """Return the class of a `TorchFunctionMode` or `TorchDispatchMode` that is active in this thread, or None.

    Such a mode intercepts every operation. A replay dispatches none, and compiled code dispatches other operations than
    the model. torch's mode of the default device is not counted: it is one of the flags.
    """
    modes = (*dispatch_mode_stack(), *function_mode_stack())
    return next((type(mode).__name__ for mode in reversed(modes) if not isinstance(mode, DeviceContext)), None)


def uses_tf32() -> bool:
    """True if float32 matrix products or convolutions run in TF32 on NVIDIA."""
    return _is_tf32("float32 matmul") or _is_tf32("float32 convolution")


def _is_tf32(name: str) -> bool:
    return _ON_CUDA[name]() in (True, "tf32")


def flags_for_workers() -> dict[str, Any]:
    """Return the flags that inductor reads while it lowers a trace, as plain data for `apply_flags` in a worker."""
    return {
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "threads": torch.get_num_threads(),
        "tf32 matmul": _is_tf32("float32 matmul"),
        "tf32 convolution": _is_tf32("float32 convolution"),
        **{name: getattr(_matmul, name) for name in _OF_MATMUL if hasattr(_matmul, name)},
    }


def apply_flags(values: Mapping[str, Any]) -> None:
    """Set the flags that `flags_for_workers` read in the main process. Raises RuntimeError if torch ignores one."""
    torch.use_deterministic_algorithms(values["deterministic"], warn_only=True)  # as ComfyUI does
    torch.set_num_threads(values["threads"])
    _matmul.allow_tf32 = values["tf32 matmul"]
    _backends.cudnn.allow_tf32 = values["tf32 convolution"]
    for name in _OF_MATMUL & values.keys():
        setattr(_matmul, name, values[name])
    if flags_for_workers() != values:
        raise RuntimeError(f"this worker computes under {flags_for_workers()}, and the main process under {values}")
