from collections.abc import Sequence
from typing import Any

import torch

def cast_bias_weight(
    s: torch.nn.Module,
    input: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    bias_dtype: torch.dtype | None = None,
    offloadable: bool = False,
    compute_dtype: torch.dtype | None = None,
    want_requant: bool = False,
) -> Any: ...
def uncast_bias_weight(s: torch.nn.Module, weight: Any, bias: Any, offload_stream: Any) -> None: ...
def cast_modules_with_vbar(
    comfy_modules: Sequence[torch.nn.Module],
    dtype: torch.dtype | None,
    device: torch.device,
    bias_dtype: torch.dtype | None,
    non_blocking: bool,
    return_faulted: bool = False,
) -> Any: ...
def resolve_cast_module_with_vbar(
    s: torch.nn.Module,
    dtype: torch.dtype,
    device: torch.device,
    bias_dtype: torch.dtype,
    compute_dtype: torch.dtype | None,
    want_requant: bool,
    return_weights: bool = True,
) -> Any: ...

disable_weight_init: Any

def pick_operations(
    weight_dtype: torch.dtype | None,
    compute_dtype: torch.dtype | None,
    load_device: torch.device | None = None,
    *,
    model_config: Any = None,
) -> Any: ...
