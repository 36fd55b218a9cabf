"""Implements `scripts/bundle`: finds the server's environment and store, exports, imports and reports.

Only `machine` needs torch and ComfyUI; the rest runs on any Python.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from compile_cache.config import CacheConfig
from compile_cache.errors import UserError
from compile_cache.store import bundle
from compile_cache.store.artifact_store import ENDING, ArtifactStore, StoreError
from compile_cache.store.bundle import BundleReport
from compile_cache.store.fingerprint import EnvironmentFingerprint

from .. import pack
from ..errors import SetupError
from ..interpreter import rerun_with

_ELSEWHERE = (
    " If ComfyUI is started with --base-directory or --user-directory, its store is elsewhere: give these arguments "
    "after --, as in `scripts/bundle export FILE -- --base-directory FOLDER`, or name the store with --store."
)


@dataclass(frozen=True, slots=True)
class Place:
    """The store and environment to use; None means those of ComfyUI's server on this machine.

    comfyui: ComfyUI's folder. environment: name of an environment in the store. server_arguments: ComfyUI's arguments.
    """

    comfyui: Path | None
    store: Path | None
    environment: str | None
    server_arguments: tuple[str, ...] = ()


@contextlib.contextmanager
def _one_sentence() -> Iterator[None]:
    try:
        yield
    except (UserError, StoreError) as error:
        raise SetupError(str(error)) from error


def describe(file: Path) -> str:
    """Describe a bundle's contents. Raises SetupError if the file is not a bundle."""
    with _one_sentence():
        contents = bundle.read_contents(file)
    lines = [f"{file} holds {len(contents.artifacts)} compiled regions, by kind:"]
    sizes: dict[str, list[int]] = {}
    for _, label, size in contents.artifacts:
        sizes.setdefault(label, []).append(size)
    lines += [f"  {label}: {len(each)}, {sum(each) / 2**20:.1f} MB" for label, each in sorted(sizes.items())]
    lines += ["for this environment:", *(f"  {name}: {value}" for name, value in contents.environment.components())]
    return "\n".join(lines)


def export_to(file: Path, place: Place) -> BundleReport:
    """Write a bundle. Raises SetupError if the store has nothing for the environment."""
    with _one_sentence():
        folder, environment, limit = _resolved(place)
        known = bundle.environments(folder).items()
        found = {name: each for name, each in known if any((folder / name).glob(f"*{ENDING}"))}
        if environment not in found.values():
            differing = {name: "; ".join(environment.difference(each)) for name, each in found.items()}
            offered = "".join(f"\n  --environment {name} has: {text}" for name, text in differing.items())
            why = offered or f" It has no regions: sample once with Compile Model first.{_ELSEWHERE}"
            raise SetupError(f"{folder} has nothing for this machine's environment.{why}")
        return bundle.export_bundle(ArtifactStore(folder, environment, limit), file)


def store_for(file: Path, place: Place) -> ArtifactStore:
    """The store to import a bundle into. Raises SetupError if the bundle is for another environment or does not fit."""
    with _one_sentence():
        contents = bundle.read_contents(file)
        folder, environment, limit = _resolved(place)
        bundle.require_same_environment(contents.environment, environment)
        store = ArtifactStore(folder, environment, limit)
        bundle.require_room(contents, store)
        return store


def import_from(file: Path, store: ArtifactStore) -> BundleReport:
    """Import a bundle. Raises SetupError if it cannot be imported."""
    with _one_sentence():
        return bundle.import_bundle(file, store)


def require_yes() -> None:
    """Raise SetupError unless the user types yes."""
    try:
        answer = input("Type yes to import it: ")
    except EOFError:
        answer = ""
    if answer.strip().lower() != "yes":
        raise SetupError("nothing was imported, because the answer was not yes (--yes skips the question).")


def say(report: BundleReport, what: str, file: Path) -> int:
    """Print the result and return the exit code."""
    print(f"{len(report.done)} regions ({report.bytes / 2**20:.1f} MB) {what} {file}.")
    if report.known:
        print(f"{len(report.known)} were in the store already.")
    for name, reason in report.refused.items():
        print(f"refused: {name}: {reason}", file=sys.stderr)
    return 1 if report.refused else 0


# --- this machine ----------------------------------------------------------------------------------------------


def _resolved(place: Place) -> tuple[Path, EnvironmentFingerprint, int]:
    """(store folder, environment, the store's limit in bytes)"""
    if place.environment is not None and place.store is not None:
        return place.store, _named(place.store, place.environment), CacheConfig.from_environment().store_bytes
    config, environment = machine(place)
    folder = place.store or config.store_folder
    if folder is None:
        raise SetupError("RESOLUTE_STORE turns the store off: name a folder with --store.")
    if place.environment is not None:
        environment = _named(folder, place.environment)
    return folder, environment, config.store_bytes


def _named(folder: Path, name: str) -> EnvironmentFingerprint:
    found = bundle.environments(folder)
    if name not in found:
        raise SetupError(f"{folder} has no environment '{name}'; it has {', '.join(found) or 'none'}.")
    return found[name]


def machine(place: Place) -> tuple[CacheConfig, EnvironmentFingerprint]:
    """The settings and environment of a server with the ComfyUI of `place`.

    Imports torch and ComfyUI, because ComfyUI's modules choose the device and set the flags of the environment. Without
    torch the command starts anew with the Python that runs ComfyUI.
    """
    if place.comfyui is None or not (place.comfyui / "comfy" / "model_management.py").is_file():
        raise SetupError("--comfyui must name ComfyUI's folder, which contains main.py and comfy.")
    rerun_with("torch", place.comfyui)
    sys.path.insert(0, str(place.comfyui.resolve()))
    sys.argv = ["main.py", *place.server_arguments]
    try:
        importlib.import_module("comfy.options").enable_args_parsing()
        management = importlib.import_module("comfy.model_management")
        folders = importlib.import_module("folder_paths")
    except ImportError as error:
        raise SetupError(f"{error}: run this with the Python that runs ComfyUI.") from error
    except (AssertionError, RuntimeError) as error:
        raise SetupError(f"ComfyUI finds no GPU here ({error}); for a server on the CPU, add -- --cpu.") from error
    given = importlib.import_module("comfy.cli_args").args
    if given.user_directory:  # main.py applies it, and main.py cannot be imported
        folders.set_user_directory(str(Path(given.user_directory).resolve()))
    device = management.get_torch_device()
    location = pack.module("nodes.adapters.process.store_location")
    config = CacheConfig.from_environment(store_folder=location.folder(), source=location.source())
    environment_of = importlib.import_module("compile_cache.backends.inductor.lower.environment").environment_of
    environment: EnvironmentFingerprint = environment_of(device, config.source)
    return config, environment
