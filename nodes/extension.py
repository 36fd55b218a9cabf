"""The pack's list of nodes. ComfyUI reads it once at startup, which also registers the HTTP routes."""

from __future__ import annotations

from comfy_api.latest import ComfyExtension, io
from server import PromptServer

from . import routes
from .compare_images import CompareImages
from .compile_controlnet import CompileControlNet
from .compile_model import CompileModel
from .compile_vae import CompileVAE, CompileVAEDecode
from .deepcache import DeepCache
from .free_graphs import FreeGraphs
from .load_checkpoint import LoadCheckpointCompiled
from .load_diffusion_model import LoadDiffusionModelFaster
from .measure import Measure
from .onediff import registration
from .report import GraphCacheReport
from .resolution import ResoluteResolution
from .warm_up import WarmUp
from .warm_up_step import WarmUpEnd, WarmUpStep


class ResoluteExtension(ComfyExtension):
    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        routes.register()
        if (server := getattr(PromptServer, "instance", None)) is not None:
            registration.begin(server)
        return [
            CompileModel,
            CompileVAEDecode,
            CompileVAE,
            CompileControlNet,
            DeepCache,
            LoadCheckpointCompiled,
            LoadDiffusionModelFaster,
            ResoluteResolution,
            GraphCacheReport,
            CompareImages,
            WarmUp,
            WarmUpStep,
            WarmUpEnd,
            FreeGraphs,
            Measure,
            *registration.nodes_to_register(),
        ]
