"""Resolute: compiled diffusion models, VAE decoders and ControlNets for ComfyUI, with one shared graph cache.

ComfyUI loads this file and calls `comfy_entrypoint`. Import ComfyUI and torch only there: pytest imports this file too,
without ComfyUI.
"""

from __future__ import annotations

from typing import Any

WEB_DIRECTORY = "./web"


async def comfy_entrypoint() -> Any:
    """The pack's nodes; ComfyUI's loader calls this once."""
    from .nodes.extension import ResoluteExtension

    return ResoluteExtension()
