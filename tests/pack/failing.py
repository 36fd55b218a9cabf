"""A failure in the middle of sampling."""

from __future__ import annotations

from typing import Any


class ResoluteTestFailingPatch:
    """Raises at the k-th call of the model in each run (0 is the first)."""

    CATEGORY = "resolute/test"
    RETURN_TYPES = ("MODEL",)
    FUNCTION = "patch"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "model": ("MODEL",),
                "step": ("INT", {"default": 1, "min": 0, "max": 1000}),
            }
        }

    def patch(self, model: Any, step: int) -> tuple[Any]:
        """Clone the model and fail in its model function wrapper."""

        def call(apply_model: Any, arguments: dict[str, Any]) -> Any:
            options = arguments["c"]["transformer_options"]
            sigma = float(arguments["timestep"].flatten()[0])
            schedule = [float(value) for value in options["sample_sigmas"]]
            if sum(value > sigma for value in schedule) >= step:
                raise RuntimeError(f"ResoluteTestFailingPatch: asked to fail at step {step}")
            return apply_model(arguments["input"], arguments["timestep"], **arguments["c"])

        patched = model.clone()
        patched.set_model_unet_function_wrapper(call)
        return (patched,)
