from collections.abc import Callable
from typing import Any

import torch

class KSAMPLER:
    def __init__(self, sampler_function: Callable[..., Any]) -> None: ...
    def sample(self, *args: Any, **kwargs: Any) -> Any: ...

def calculate_sigmas(model_sampling: object, scheduler_name: str, steps: int) -> torch.Tensor: ...
