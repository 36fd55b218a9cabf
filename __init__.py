"""Resolute: compiled diffusion models, VAE decoders and ControlNets for ComfyUI, with one shared graph cache.

ComfyUI loads this file and calls `comfy_entrypoint`. Import ComfyUI and torch only there: pytest imports this file too,
without ComfyUI.
"""

from __future__ import annotations

import logging
import sys
from typing import Any


def _loaded_before() -> Any:
    """The copy of this pack in another folder whose nodes ComfyUI registered before; None if there is none."""
    registered = getattr(sys.modules.get("nodes"), "NODE_CLASS_MAPPINGS", {})
    package = getattr(registered.get("ResoluteCompileModel"), "__module__", "").rpartition(".nodes.")[0]
    copy: Any = sys.modules.get(package)
    # Compare the paths as ComfyUI wrote them, unresolved: two copies may be links to one folder.
    return None if copy is None or copy.__path__[0] == __path__[0] else copy


if (_first := _loaded_before()) is None:
    WEB_DIRECTORY = "./web"
    other_copies: list[str] = []  # folders of copies that ComfyUI loaded later, named in a text on our nodes
else:
    # With NODE_CLASS_MAPPINGS ComfyUI does not call `comfy_entrypoint`; without WEB_DIRECTORY it serves no scripts.
    NODE_CLASS_MAPPINGS: dict[str, Any] = {}
    getattr(_first, "other_copies", []).append(__path__[0])
    logging.getLogger(__name__).warning(
        "Resolute is installed twice. The copy in %s runs, the one in %s does nothing. Delete one of them, then "
        "restart ComfyUI.",
        _first.__path__[0],
        __path__[0],
    )


async def comfy_entrypoint() -> Any:
    """The pack's nodes; ComfyUI's loader calls this once."""
    from .nodes.extension import ResoluteExtension

    return ResoluteExtension()
