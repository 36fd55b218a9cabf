"""What inductor's code depends on besides the regions themselves."""

from __future__ import annotations

import functools
import platform
import sys
from importlib.metadata import PackageNotFoundError, version

import torch
from torch._inductor import config as inductor_config

from ...fingerprint import EnvironmentFingerprint
from ...keys import digest

# Settings of how inductor works, which its code does not show.
_HOW_NOT_WHAT = frozenset({"compile_threads", "worker_start_method", "cpp.vec_isa_ok", "cpp.cxx"})


def environment_of(device: torch.device, source: str) -> EnvironmentFingerprint:
    """The environment of code for a device. `source`: a digest of the source code that regions are traced from."""
    return EnvironmentFingerprint(
        torch=torch.__version__,
        triton=_version("triton") or _version("triton-windows") or "none",
        python=f"{sys.version_info.major}.{sys.version_info.minor}",
        platform=f"{sys.platform} {platform.machine()}",
        device=_device(device),
        precision=_precision(device),
        settings=_settings(),
        source=source,
    )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _device(device: torch.device) -> str:
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"{torch.cuda.get_device_name(device)}, sm_{major}{minor}"
    # Generated C++ has the vector instructions and the number of threads in it.
    return f"{device.type} {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"


def _precision(device: torch.device) -> str:
    """Flags that change the numbers."""
    if device.type != "cuda":
        return "default"
    matmul = torch.backends.cuda.matmul
    flags = {
        "tf32 matmul": matmul.allow_tf32,
        "tf32 cudnn": torch.backends.cudnn.allow_tf32,
        "fp16 reduction": matmul.allow_fp16_reduced_precision_reduction,
        "bf16 reduction": matmul.allow_bf16_reduced_precision_reduction,
        "fp16 accumulation": getattr(matmul, "allow_fp16_accumulation", False),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    return ", ".join(f"{name} {_on(value)}" for name, value in flags.items())


def _on(value: object) -> str:
    return str(value) if not isinstance(value, bool) else "on" if value else "off"


@functools.cache
def _settings() -> str:
    """Inductor's own settings, as far as they change the code: a user may have set some by environment variables."""
    portable = inductor_config.save_config_portable(ignore_private_configs=True)
    kept = sorted((name, repr(value)) for name, value in portable.items() if name not in _HOW_NOT_WHAT)
    return digest(tuple(kept))[:16]
