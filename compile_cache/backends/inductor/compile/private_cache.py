"""Folders for the code that inductor loads, in which no other user of the machine could have written.

Inductor loads sources, libraries and Triton's binaries from its cache, and uses a file that is there as it is. The
cache is in the system's temporary directory by default, under a name that another user can take first.
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
from ....torch_facts.private_names import (
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
# Triton's texts, which nothing loads while the binary is there; they name the path of their source.
_TEXTS = (".source", ".ttir", ".ttgir", ".llir", ".ptx", ".amdgcn")
# Inductor's setting for a compile and for a load. With more threads it starts a process for its own workers when the
# first kernel is loaded: that imports torch for ten seconds at usual priority, and ours have compiled what it would.
IN_THIS_PROCESS = {"compile_threads": 1}


# Held by a compile and by a load: modules that torch loads meanwhile are taken for those of its code.
one_at_a_time = threading.RLock()


@contextlib.contextmanager
def private_cache() -> Iterator[None]:
    """While code is compiled or loaded: inductor's and Triton's own cache folders if they can be used, else ours.

    The folders are variables of the process, so another pack that compiles meanwhile uses the same ones. Raises OSError
    where no private folder can be made.
    """
    # `_is_usable` makes the folder. Inductor would make it by the umask, and 002 lets a group write.
    _is_usable(Path(os.environ[_INDUCTOR] if _INDUCTOR in os.environ else default_cache_dir()))
    inductor = Path(cache_dir())  # which also sets inductor's variable, so before it is read
    before = {name: os.environ[name] for name in (_INDUCTOR, _TRITON) if name in os.environ}
    triton = Path(before[_TRITON]) if _TRITON in before else None
    changed = []
    if not _is_usable(inductor):
        os.environ[_INDUCTOR] = str(_own_folder())
        changed = [_INDUCTOR, _TRITON]  # inductor sets Triton's to a place inside its own, at its first kernel
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
    """Inductor's settings for a compile. It includes headers from below its default folder, whichever its cache is."""
    return {} if _is_usable(Path(default_cache_dir())) else {"cpp_cache_precompile_headers": False}


def place(path: Path, content: bytes) -> None:
    """Make sure that a file has this content, which the store's digest covers, whatever is there. Raises OSError."""
    if not path.is_symlink() and path.is_file() and path.read_bytes() == content:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as stream:
        stream.write(content)


def remove_other_source(graph: CompiledFxGraph) -> None:
    """Remove another source of the graph's name, which inductor would load as it is. Raises OSError."""
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
    """The files of Triton's kernels, in folders that are there: inductor writes only those that are not."""
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
    """It is private, and inductor can compile C++ in it."""
    try:
        make_private(folder)
        why = why_not_private(folder) or _why_no_compiler(folder)
    except OSError as error:
        why = str(error)
    if why is not None:
        _warn(why)
    return why is None


def _why_no_compiler(folder: Path) -> str | None:
    """Inductor takes its command for the C++ compiler apart at spaces. What Windows does was not tried."""
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
    """In the user's cache, made anew if it is gone; where that cannot be used, a temporary folder of this process.
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
