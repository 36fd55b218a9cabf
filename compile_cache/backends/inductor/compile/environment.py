"""What inductor's code depends on besides the regions themselves."""

from __future__ import annotations

import contextlib
import functools
import platform
import sys
import threading
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch._inductor import config as inductor_config

from ....keys import digest
from ....store.fingerprint import EnvironmentFingerprint

# Settings of how and where inductor works, which its code does not show.
_HOW_NOT_WHAT = frozenset(
    {
        "compile_threads", "worker_start_method", "cpp.vec_isa_ok", "cpp.cxx", "cuda.cuda_cxx", "rocm.rocm_home",
        "worker_log_path", "torchinductor_worker_logpath", "autoheuristic_log_path", "triton.proton_output_dir",
        "global_cache_dir", "disable_progress", "verbose_progress", "log_tlparse",
    }
)  # fmt: skip
# Functions of somebody else that rewrite the graph; inductor leaves them out of what it tells.
_PASSES = (
    "pre_grad_custom_pass", "joint_custom_pre_pass", "joint_custom_post_pass",
    "post_grad_custom_pre_pass", "post_grad_custom_post_pass", "_pre_fusion_custom_pass",
)  # fmt: skip

_lock = threading.Lock()
_before: list[str] = []  # the settings from before the compile that has them changed


def environment_of(device: torch.device, source: str) -> EnvironmentFingerprint:
    """The environment of code for a device. `source`: a digest of the source code that regions are traced from."""
    return EnvironmentFingerprint(
        torch=str(torch.__version__),  # a class of its own has another digest than the text on disk
        triton=_version("triton") or _version("triton-windows") or "none",
        python=f"{sys.version_info.major}.{sys.version_info.minor}",
        platform=f"{sys.platform} {platform.machine()}",
        device=_device(device),
        precision=_precision(device),
        settings=_settings(),
        source=source,
    )


@functools.cache
def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _device(device: torch.device) -> str:
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"{torch.cuda.get_device_name(device)}, sm_{major}{minor}"
    # Generated C++ is compiled for exactly this processor (-march=native), and has the number of threads in it.
    capability, threads = torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()
    return f"{device.type} {capability}, instructions {_instructions()}, {threads} threads"


@functools.cache
def _instructions(listed: Path = Path("/proc/cpuinfo")) -> str:
    """Which instructions the processor has, as a digest: another one may not know what was compiled for this."""
    try:
        lines = listed.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # no Linux
        lines = []
    names = next((line for line in lines if line.split(":")[0].strip() in ("flags", "Features")), platform.processor())
    return digest(" ".join(sorted(names.split())))[:8]


def _precision(device: torch.device) -> str:
    """Flags that change the numbers."""
    flags: dict[str, object] = {"deterministic": torch.are_deterministic_algorithms_enabled()}
    if device.type == "cuda":
        matmul = torch.backends.cuda.matmul
        flags |= {
            "tf32 matmul": tf32_matmul(),
            "tf32 cudnn": tf32_convolution(),
            "fp16 reduction": matmul.allow_fp16_reduced_precision_reduction,
            "bf16 reduction": matmul.allow_bf16_reduced_precision_reduction,
            "fp16 accumulation": getattr(matmul, "allow_fp16_accumulation", False),
        }
    return ", ".join(f"{name} {_on(value)}" for name, value in flags.items())


def flags() -> dict[str, Any]:
    """The state of this process that the environment consists of, for another process to take on."""
    matmul = torch.backends.cuda.matmul
    return {
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "threads": torch.get_num_threads(),
        "tf32 matmul": tf32_matmul(),
        "tf32 convolution": tf32_convolution(),
        "fp16 reduction": matmul.allow_fp16_reduced_precision_reduction,
        "bf16 reduction": matmul.allow_bf16_reduced_precision_reduction,
        "fp16 accumulation": getattr(matmul, "allow_fp16_accumulation", None),
    }


def apply_flags(values: Mapping[str, Any]) -> None:
    """Take on what `flags` told of another process."""
    matmul = torch.backends.cuda.matmul
    torch.use_deterministic_algorithms(values["deterministic"], warn_only=True)  # as core does
    torch.set_num_threads(values["threads"])
    matmul.allow_tf32 = values["tf32 matmul"]
    torch.backends.cudnn.allow_tf32 = values["tf32 convolution"]
    matmul.allow_fp16_reduced_precision_reduction = values["fp16 reduction"]
    matmul.allow_bf16_reduced_precision_reduction = values["bf16 reduction"]
    if values["fp16 accumulation"] is not None:
        matmul.allow_fp16_accumulation = values["fp16 accumulation"]


def tf32_matmul() -> bool:
    """Whether float32 matrices are multiplied in TF32 on NVIDIA."""
    return _tf32(torch.backends.cuda.matmul, torch.backends.cuda.matmul)


def tf32_convolution() -> bool:
    """The same for convolutions."""
    return _tf32(torch.backends.cudnn, getattr(torch.backends.cudnn, "conv", None))


def _tf32(switch: Any, precision: Any) -> bool:
    """torch 2.9 and newer have `fp32_precision`, and refuse to tell `allow_tf32` once somebody has set that."""
    set_to = getattr(precision, "fp32_precision", None)
    return bool(switch.allow_tf32) if set_to is None else set_to == "tf32"


def _on(value: object) -> str:
    return str(value) if not isinstance(value, bool) else "on" if value else "off"


@contextlib.contextmanager
def own_settings() -> Iterator[None]:
    """A compile changes inductor's settings for itself: meanwhile every thread is told those from before."""
    with _lock:
        _before.append(_before[0] if _before else _read_settings())
    try:
        yield
    finally:
        _before.pop()


def _settings() -> str:
    """Inductor's own settings, as far as they change the code. Read anew: another pack may have changed one since."""
    with _lock:
        return _before[0] if _before else _read_settings()


def _read_settings() -> str:
    """Some milliseconds."""
    portable = inductor_config.save_config_portable(ignore_private_configs=True)
    portable |= {name: getattr(inductor_config, name, None) for name in _PASSES}
    kept = sorted((name, repr(value)) for name, value in portable.items() if name not in _HOW_NOT_WHAT)
    return digest(tuple(kept))[:16]
