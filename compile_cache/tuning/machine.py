"""The machine on which a time was measured."""

from __future__ import annotations

import os
import platform
import sys

import torch

from ..torch_compat.private_names import driver_version


def machine_of(device: str) -> tuple[str, ...]:
    """Return a device's name ("cuda:0") or GPU model, and the versions that the times of its kernels depend on."""
    if not device.startswith("cuda"):
        return (device, str(torch.__version__))
    name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    memory = torch.cuda.get_device_properties(device).total_memory
    cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    versions = (driver_version(), torch.__version__, torch.version.cuda, cudnn)
    return (name, str(capability), str(memory), *map(str, versions))


def host() -> tuple[str, ...]:
    """Return the host, and the names of ComfyUI's options: the time to launch kernels depends on both."""
    options = sorted(word.partition("=")[0] for word in sys.argv[1:] if word.startswith("--"))  # not ports and paths
    return (platform.system(), platform.machine(), str(os.cpu_count()), platform.python_version(), *options)
