"""The environment: everything that inductor's generated code depends on, besides the regions themselves."""

from __future__ import annotations

import contextlib
import functools
import platform
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import torch

from ....keys import digest
from ....packages import version_of
from ....store.fingerprint import EnvironmentFingerprint
from ....torch_compat.private_names import compile_lock, inductor_config, portable_config

# Settings of how and where inductor compiles. The generated code does not depend on them.
_HOW_NOT_WHAT = frozenset(
    {
        "compile_threads", "worker_start_method", "cpp.vec_isa_ok", "cpp.cxx", "cuda.cuda_cxx", "rocm.rocm_home",
        "worker_log_path", "torchinductor_worker_logpath", "autoheuristic_log_path", "triton.proton_output_dir",
        "global_cache_dir", "disable_progress", "verbose_progress", "log_tlparse",
    }
)  # fmt: skip
# Settings for custom graph passes, which other packs may set. `save_config_portable` omits them.
_PASSES = (
    "pre_grad_custom_pass", "joint_custom_pre_pass", "joint_custom_post_pass",
    "post_grad_custom_pre_pass", "post_grad_custom_post_pass", "_pre_fusion_custom_pass",
)  # fmt: skip

_version = functools.cache(version_of)
_lock = threading.Lock()
_latest: str | None = None  # the latest result of `_read_settings`
_before: list[str] = []  # for each running compile, the digest of the settings before it


def environment_of(device: torch.device, source: str) -> EnvironmentFingerprint:
    """The environment of code for a device. source: a digest of the code that makes regions.

    Each call reads the environment, which takes milliseconds.
    """
    return EnvironmentFingerprint(
        torch=str(torch.__version__),  # torch's is a subclass of str, whose digest would differ from a str's
        triton=_version("triton") or _version("triton-windows") or "none",
        python=f"{sys.version_info.major}.{sys.version_info.minor}",
        platform=f"{sys.platform} {platform.machine()}",
        device=_device(device),
        settings=_settings(),
        source=source,
    )


def _device(device: torch.device) -> str:
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"{torch.cuda.get_device_name(device)}, sm_{major}{minor}"
    # Inductor compiles C++ for exactly this processor (-march=native) and writes the number of threads into it.
    capability, threads = torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()
    return f"{device.type} {capability}, instructions {_instructions()}, {threads} threads"


@functools.cache
def _instructions(listed: Path = Path("/proc/cpuinfo")) -> str:
    """A digest of the processor's instruction set: another processor may lack instructions that the code uses."""
    try:
        lines = listed.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # not Linux
        lines = []
    names = next((line for line in lines if line.split(":")[0].strip() in ("flags", "Features")), platform.processor())
    return digest(" ".join(sorted(names.split())))[:8]


@contextlib.contextmanager
def own_settings() -> Iterator[None]:
    """During a compile, make `environment_of` return the settings from before it, in every thread.

    A compile changes inductor's settings while it runs.
    """
    with compile_lock, _lock:
        _before.append(_before[0] if _before else _read_settings())
    try:
        yield
    finally:
        _before.pop()


def _settings() -> str:
    """A digest of inductor's settings that change the generated code.

    `torch.compile` changes them during a compile and holds torch's `compile_lock` meanwhile. While another thread
    compiles, this returns the settings read before; the first reader waits until the compile ends.
    """
    if not compile_lock.acquire(blocking=_latest is None):
        assert _latest is not None
        return _latest
    try:
        with _lock:
            return _before[0] if _before else _read_settings()
    finally:
        compile_lock.release()


def _read_settings() -> str:
    global _latest
    if portable_config is None:  # then no code is stored, so the digest is not needed
        _latest = ""
        return _latest
    portable = portable_config(ignore_private_configs=True)
    portable |= {name: getattr(inductor_config, name, None) for name in _PASSES}
    kept = sorted((name, repr(value)) for name, value in portable.items() if name not in _HOW_NOT_WHAT)
    _latest = digest(tuple(kept))[:16]
    return _latest
