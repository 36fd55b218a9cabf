"""Report the tools that a machine lacks to compile: inductor needs Triton and a C compiler for a GPU, a C++ compiler
for a CPU, and Python's headers for both.

If one is missing, every compile fails, with a compiler's message about a file of torch or Triton.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch

from ...torch_compat.gpu import is_nvidia

OLDEST_CAPABILITY = (7, 0)  # Volta; for older GPUs inductor traces and lowers each region, then refuses it
_SEARCHED = ("CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH")  # variables whose folders compilers search
_WINDOWS = sys.platform == "win32"


class Lack(NamedTuple):
    """A missing tool and its remedy: two sentences, the first without its full stop."""

    reason: str
    remedy: str


def lack_of(device: str) -> Lack | None:
    """The first tool missing for a device type ("cuda", "cpu"); None if none is missing. Imports nothing."""
    return (_lack_on_gpu() if device == "cuda" else _lack_on_cpu()) or _lack_of_headers()


def _lack_on_gpu() -> Lack | None:
    if find_spec("triton") is None:
        remedy = "Install the one that fits torch: 'triton', on Windows 'triton-windows' (versions: docs/settings.md)."
        return Lack("Triton is not installed", remedy)
    none = Lack("Triton finds no C compiler", "Install one, for example 'apt install gcc', or choose 'auto'.")
    if not _WINDOWS and (lack := _lack_of_compiler("CC", none, "gcc", "clang")):  # Triton brings one for Windows
        return lack
    if is_nvidia("cuda") and torch.cuda.is_available():
        capability = torch.cuda.get_device_capability()
        if capability < OLDEST_CAPABILITY:
            needed, found = (".".join(map(str, each)) for each in (OLDEST_CAPABILITY, capability))
            return Lack(f"Triton needs compute capability {needed}, and this GPU has {found}", "Choose 'auto'.")
    return None


def _lack_on_cpu() -> Lack | None:
    name = "cl" if _WINDOWS else "clang++" if sys.platform == "darwin" else "g++"  # torch's own choices
    none = Lack("there is no C++ compiler", "Install one, for example 'apt install g++', or choose 'auto'.")
    return _lack_of_compiler("CXX", none, name)


def _lack_of_compiler(variable: str, none: Lack, *names: str) -> Lack | None:
    """Look for a compiler. variable: if set, torch and Triton use only the compiler it names; else one of `names`."""
    given = os.environ.get(variable)
    if any(shutil.which(name) for name in ((given,) if given else names)):
        return None
    if given:
        return Lack(f"{variable} names {given!r}, which is no program here", f"Correct {variable}, or choose 'auto'.")
    return none


def _lack_of_headers() -> Lack | None:
    """Look for Python's headers. ComfyUI's portable build lacks them, and so does Linux without python-dev."""
    include = Path(sysconfig.get_path("include", "nt" if _WINDOWS else "posix_prefix"))
    named = [Path(folder) for name in _SEARCHED for folder in os.environ.get(name, "").split(os.pathsep) if folder]
    has_headers = any((folder / "Python.h").is_file() for folder in (include, *named))
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    if not _WINDOWS:
        if has_headers:
            return None
        remedy = f"Install them, for example 'apt install python{version}-dev', or choose 'auto'."
        return Lack(f"{include / 'Python.h'} is missing, so compilers find no headers of Python", remedy)
    libs = Path(sys.base_prefix) / "libs"
    if has_headers and (libs / f"python{version.replace('.', '')}.lib").is_file():
        return None
    missing = libs if has_headers else include
    remedy = f"Copy 'include' and 'libs' of a usual Python {platform.python_version()} to {sys.base_prefix}."
    return Lack(f"the folder {missing} of Python is missing, and compilers need it", remedy)
