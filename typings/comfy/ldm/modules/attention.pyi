from collections.abc import Callable

import torch

optimized_attention: Callable[..., torch.Tensor]
