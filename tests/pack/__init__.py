"""A test-only node pack: tiny models, exact latents, and changes of a model as other packs make them.

The servers of the tests load it as a custom node; it is not part of the release. It works on every supported ComfyUI.
"""

import importlib

from .node import Node

MODULES = (
    "conditioning", "controlnets", "deepcache_loop", "failures", "formats", "global_state", "held", "latents",
    "loading", "models", "patches", "references", "transformers", "unknown_models", "vaes",
)  # fmt: skip
for name in MODULES:
    importlib.import_module(f".{name}", __name__)
NODE_CLASS_MAPPINGS = {node.__name__: node for node in Node.__subclasses__()}
