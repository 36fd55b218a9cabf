"""The class names of our nodes that compile, including those under OneDiff's names."""

from __future__ import annotations

_ONEDIFF_LOADERS = (
    "OneDiffCheckpointLoaderSimple",
    "OneDiffDeepCacheCheckpointLoaderSimple",
    "OneDiffQuantCheckpointLoaderSimple",
    "OneDiffQuantCheckpointLoaderSimpleAdvanced",
    "ImageOnlyOneDiffQuantCheckpointLoaderAdvanced",
)
_ONEDIFF_MODELS = ("ModelSpeedup", "SVDSpeedup", "ModuleDeepCacheSpeedup")
_ONEDIFF_CONTROLNETS = ("ControlnetSpeedup", "ControlNetSpeedup", "OneDiffControlNetLoader")

LOADERS = ("ResoluteLoadCheckpoint", *_ONEDIFF_LOADERS)
MODEL_COMPILERS = ("ResoluteCompileModel", *_ONEDIFF_MODELS, *LOADERS)
VAE_COMPILERS = ("ResoluteCompileVAE", "ResoluteCompileVAEDecode", "VaeSpeedup")
# These have no input `backend`: they compile with auto.
WITH_AUTO = frozenset({*_ONEDIFF_MODELS, "VaeSpeedup", *_ONEDIFF_CONTROLNETS, *_ONEDIFF_LOADERS})
