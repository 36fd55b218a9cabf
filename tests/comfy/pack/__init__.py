"""A test-only node pack: changes of a model as other packs make them, and models that Resolute does not know.

The servers of these tests load it as a custom node; it is not part of the release.
"""

from .controlnets import ResoluteTestControlNet, ResoluteTestHint
from .failures import ResoluteTestEmptyConditioning, ResoluteTestFailingBlock, ResoluteTestResidual
from .formats import ResoluteTestFormatModel, ResoluteTestFreeMemory
from .global_state import ResoluteTestGlobalState
from .held import ResoluteTestHeld
from .loading import ResoluteTestLowVRAM, ResoluteTestOtherModel, ResoluteTestUnloadInTheMiddle
from .models import ResoluteTestCountingModel, ResoluteTestUnknownModel
from .patches import ResoluteTestPatch
from .svd import ResoluteTestSVD
from .vaes import ResoluteTestLatent, ResoluteTestVAE, ResoluteTestVAEMemory, ResoluteTestVAEOutOfMemory

NODES = (
    ResoluteTestControlNet,
    ResoluteTestCountingModel,
    ResoluteTestHint,
    ResoluteTestEmptyConditioning,
    ResoluteTestFailingBlock,
    ResoluteTestFormatModel,
    ResoluteTestFreeMemory,
    ResoluteTestGlobalState,
    ResoluteTestHeld,
    ResoluteTestLatent,
    ResoluteTestLowVRAM,
    ResoluteTestOtherModel,
    ResoluteTestPatch,
    ResoluteTestResidual,
    ResoluteTestSVD,
    ResoluteTestUnknownModel,
    ResoluteTestUnloadInTheMiddle,
    ResoluteTestVAE,
    ResoluteTestVAEMemory,
    ResoluteTestVAEOutOfMemory,
)
NODE_CLASS_MAPPINGS = {node.__name__: node for node in NODES}
