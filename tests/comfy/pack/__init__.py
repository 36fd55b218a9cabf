"""A test-only node pack: what other packs do to a model, and models that Resolute does not know.

The servers of these tests load it as a custom node; it never ships.
"""

from .models import ResoluteTestUnknownModel
from .patches import ResoluteTestPatch

NODES = (ResoluteTestPatch, ResoluteTestUnknownModel)
NODE_CLASS_MAPPINGS = {node.__name__: node for node in NODES}
