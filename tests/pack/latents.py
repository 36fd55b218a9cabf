"""Latents as files, so that a test can compare them exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import folder_paths
import numpy
import torch

from .node import Node


class ResoluteTestSaveLatent(Node):
    """Writes the samples to the output folder as a float32 ``.npy`` file."""

    RETURN_TYPES = ()
    FUNCTION = "save"
    OUTPUT_NODE = True
    INPUTS = {
        "samples": ("LATENT",),
        "filename_prefix": ("STRING", {"default": "latent"}),
    }

    def save(self, samples: dict[str, Any], filename_prefix: str) -> dict[str, Any]:
        """Returns ``ui`` entries ``latents`` in the form of SaveImage's, so that /view serves the files."""
        folder, name, counter, subfolder, _ = folder_paths.get_save_image_path(
            filename_prefix, folder_paths.get_output_directory()
        )
        # get_save_image_path counts only images, so skip the files of earlier calls.
        while (path := Path(folder) / f"{name}_{counter:05}_.npy").exists():
            counter += 1
        found = samples["samples"]
        if found.is_nested:  # a video and its sound
            found = torch.cat([each.flatten() for each in found.unbind()])
        numpy.save(path, found.float().cpu().numpy())
        entry = {"filename": path.name, "subfolder": subfolder, "type": "output"}
        return {"ui": {"latents": [entry]}}
