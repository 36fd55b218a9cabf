"""A test-only node pack: a MODEL whose UNet runs as a plain loop over its blocks. It never ships."""

from __future__ import annotations

from typing import Any

from .reference import Driver


class ResoluteTestDeepCacheReference:
    """Every `interval`-th step of each run in full, the others from what the last full one kept."""

    CATEGORY = "resolute/test"
    RETURN_TYPES = ("MODEL",)
    FUNCTION = "patch"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        number = ("INT", {"default": 3, "min": 1, "max": 100})
        return {"required": {"model": ("MODEL",), "interval": number, "depth": number}}

    def patch(self, model: Any, interval: int, depth: int) -> tuple[Any]:
        clone = model.clone()
        driver = Driver(clone.get_model_object("diffusion_model"), depth, list(range(0, 1000, interval)))
        clone.add_object_patch("diffusion_model._forward", driver)
        return (clone,)


NODE_CLASS_MAPPINGS = {"ResoluteTestDeepCacheReference": ResoluteTestDeepCacheReference}
