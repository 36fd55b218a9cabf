"""Cache folders for inductor's code to which no other user of the machine can write.

Inductor loads sources, libraries and Triton's binaries from its cache, and does not check an existing file. By default
the cache is in the system's temporary directory, under a name that another user can create first.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from ....store.private_files import atomic_write, make_private, require_private, why_not_private
from ....store.temporary_folders import TemporaryFolder
from ....torch_compat.private_names import (
    CompiledFxGraph,
    TritonBundle,
    TritonBundler,
    cache_dir,
    default_cache_dir,
    get_path,
    triton_cache_dir,
)

logger = logging.getLogger(__name__)

_INDUCTOR, _TRITON = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"
# Triton's intermediate representations, which nothing loads if the binary exists; they contain their source's path.
_TEXTS = (".source", ".ttir", ".ttgir", ".llir", ".ptx", ".amdgcn")
# Inductor's setting for a compile and for a load. With more threads inductor starts its own worker process at the first
# kernel: that imports torch for ten seconds at normal priority, and our workers have compiled the kernels already.
IN_THIS_PROCESS = {"compile_threads": 1}


# Held during a compile and a load, because modules that torch loads meanwhile count as that code's modules.
inductor_lock = threading.RLock()


@contextlib.contextmanager
def private_cache() -> Iterator[None]:
    """For a compile or load: use inductor's and Triton's own cache folders if these are usable, else our folders.

    The folders are environment variables, so another pack that compiles meanwhile uses the same ones. Raises OSError if
    no private folder can be created.
    """
    # `_is_usable` creates the folder. Inductor would create it by the umask, and 002 lets a group write.
    _is_usable(Path(os.environ[_INDUCTOR] if _INDUCTOR in os.environ else default_cache_dir()))
    inductor = Path(cache_dir())  # this call also sets inductor's variable, which the next line reads
    before = {name: os.environ[name] for name in (_INDUCTOR, _TRITON) if name in os.environ}
    triton = Path(before[_TRITON]) if _TRITON in before else None
    changed = []
    if not _is_usable(inductor):
        os.environ[_INDUCTOR] = str(_own_folder())
        changed = [_INDUCTOR, _TRITON]  # at the first kernel inductor sets Triton's variable to a subfolder
        if triton is not None and triton.is_relative_to(inductor):
            del os.environ[_TRITON]
            triton = None
    if triton is not None and not _is_usable(triton):
        os.environ[_TRITON] = str(_own_folder() / "triton")
        changed.append(_TRITON)
    try:
        yield
    finally:
        for name in changed:
            os.environ.pop(name, None)
            if name in before:
                os.environ[name] = before[name]


def header_settings() -> dict[str, bool]:
    """Inductor's settings for a compile. Precompiled headers are in its default folder, whichever cache is set."""
    return {} if _is_usable(Path(default_cache_dir())) else {"cpp_cache_precompile_headers": False}


def place(path: Path, content: bytes) -> None:
    """Make sure that a file has this content, verified by the store's digest; overwrite any other. Raises OSError."""
    if not path.is_symlink() and path.is_file() and path.read_bytes() == content:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as stream:
        stream.write(content)


def remove_other_source(graph: CompiledFxGraph) -> None:
    """Remove a source file of the graph's name with other content: inductor would load it unchecked. Raises OSError."""
    path = Path(get_path(graph.cache_key, "py")[2])
    try:
        same = not path.is_symlink() and path.read_text("utf-8") == graph.source_code  # as inductor writes it
    except FileNotFoundError:
        return
    except UnicodeDecodeError:
        same = False
    if not same:
        path.unlink()


def place_binaries(bundle: TritonBundle) -> None:
    """Write the kernel files of the bundle into existing Triton folders: inductor writes only into missing folders."""
    for kernel in bundle.kernel_artifacts:
        folder = os.path.join(triton_cache_dir(kernel.device), kernel.kernel_hash)  # noqa: PTH118 (as in its JSON)
        if not Path(folder).is_dir():
            continue
        for file in kernel.artifacts:
            if file.filename.endswith(_TEXTS):
                continue
            content = file.payload
            if file.filename.endswith(".json"):
                content = content.replace(TritonBundler._REPLACE_BYTES, folder.encode())
            place(Path(folder) / file.filename, content)


def _is_usable(folder: Path) -> bool:
    """True if the folder is private, and inductor can compile C++ in it. Creates it; logs why not."""
    try:
        make_private(folder)
        why = why_not_private(folder) or _why_no_compiler(folder)
    except OSError as error:
        why = str(error)
    if why is not None:
        _warn(why)
    return why is None


def _why_no_compiler(folder: Path) -> str | None:
    """Inductor splits its C++ compiler command at spaces, so a path with a space fails. Not tested on Windows."""
    if sys.platform == "win32" or not any(map(str.isspace, str(folder))):
        return None
    return f"{folder} has a space in its name, which torch's commands for the C++ compiler do not allow"


@functools.cache
def _warn(why: str) -> None:
    logger.warning(
        "Resolute: %s, so no compiled code is loaded from it and a folder of Resolute's own is used. Remove it, or set "
        "TORCHINDUCTOR_CACHE_DIR and TRITON_CACHE_DIR to folders of your own.",
        why,
    )


def _own_folder() -> Path:
    """A folder in the user's cache, created if missing; if that is not usable, a temporary folder of this process.
    Raises OSError.
    """
    try:
        folder = Path.home() / ".cache" / "resolute" / "inductor"
        make_private(folder)
        if why_not_private(folder) is None and _why_no_compiler(folder) is None:
            return folder
    except (OSError, RuntimeError) as error:  # no home
        logger.debug("Resolute: no private cache in the home folder: %s", error)
    folder = _temporary_folder()
    make_private(folder)
    require_private(folder)
    return folder


@functools.cache
def _temporary_folder() -> Path:
    temporary = TemporaryFolder()
    atexit.register(temporary.remove)
    return temporary.path
