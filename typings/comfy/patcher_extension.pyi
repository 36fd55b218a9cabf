from collections.abc import Callable
from typing import Any

class CallbacksMP:
    ON_CLONE: str
    ON_LOAD: str
    ON_DETACH: str
    ON_CLEANUP: str
    ON_PRE_RUN: str

class PatcherInjection:
    def __init__(self, inject: Callable[[Any], None], eject: Callable[[Any], None]) -> None: ...

class WrappersMP:
    OUTER_SAMPLE: str
    PREPARE_SAMPLING: str
    SAMPLER_SAMPLE: str
    PREDICT_NOISE: str
    CALC_COND_BATCH: str
    APPLY_MODEL: str
    DIFFUSION_MODEL: str

def get_all_wrappers(
    wrapper_type: str, transformer_options: dict[str, Any], is_model_options: bool = False
) -> list[Callable[..., Any]]: ...
