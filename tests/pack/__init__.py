"""A test-only node pack: tiny models, exact latents, and a failure on request.

ComfyUI loads it as a custom node; it is not part of the release. It has V1 nodes, so that
one file works on every supported ComfyUI.
"""

from .conditioning import ResoluteTestConditioning
from .failing import ResoluteTestFailingPatch
from .latents import ResoluteTestSaveLatent
from .models import ResoluteTestTinyModel, ResoluteTestTinyVAE
from .transformers import ResoluteTestTransformer

NODES = (
    ResoluteTestConditioning,
    ResoluteTestFailingPatch,
    ResoluteTestSaveLatent,
    ResoluteTestTinyModel,
    ResoluteTestTinyVAE,
    ResoluteTestTransformer,
)
NODE_CLASS_MAPPINGS = {node.__name__: node for node in NODES}
