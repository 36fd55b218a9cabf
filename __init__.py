"""Resolute: compiled diffusion models, VAE decoders and one graph cache for ComfyUI.

ComfyUI loads this file by path and asks for `comfy_entrypoint`. Nothing of ComfyUI, and no torch, is imported before.
"""

from __future__ import annotations

from typing import Any

WEB_DIRECTORY = "./web"


async def comfy_entrypoint() -> Any:
    """The pack's nodes, for ComfyUI's loader."""
    from .nodes.extension import ResoluteExtension

    return ResoluteExtension()
