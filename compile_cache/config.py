"""Settings of the cache. This is the only place that reads RESOLUTE_* variables."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .attribute_policy import PLAIN, ModuleAttributePolicy
from .errors import UserError

_MIB = 1024 * 1024
_GPU_FRACTION = 4  # by default, captures keep at most a quarter of a GPU between runs, to leave room for the weights
ATTENTION = ("measured", "flash")
BACKGROUND = "behind"
COMPILE = (BACKGROUND, "before")
_PACK = re.compile(r"[^@]+@[^@:]+:[0-9a-f]{16}")


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The settings.

    budget_bytes: limit of the device memory that captures occupy.
    capture: if False, compiled regions run without CUDA graphs.
    verify: compare every region with eager at each new shape, not only when a shape leaves the verified range.
    store_folder: stores compiled regions across restarts; None stores nothing. store_bytes: its size limit.
    remember: also store the shapes that each model was used with, and preload their regions after a restart.
    workers: number of processes that compile regions. None: as many as fit in memory. 0: this process compiles.
    source: digest of the code that makes regions. Regions from other code are not used.
    application: name of the application and a digest of its source. After a change, stored regions and calls are
        compared again, and shapes from before are not known to be ready.
    trusted: code of other packs that may be compiled and captured: "module.Class" for a class of a model, and
        "name@version:digest" for a whole pack, with a digest of its Python source.
    management_modules: modules whose functions move memory and compute nothing, and full names of such functions;
        other packs may replace these functions.
    attention: "measured", on NVIDIA the fastest kernel of each shape (attention/), or "flash", fixed by the trace.
        A value other than the default is part of `source`.
    compile: when missing code of regions is compiled. "behind": in the background, while the call runs the originals;
        "before": before the call, which waits.
    attribute_policy: how to interpret the attributes of the application's modules.
    spare_bytes: device memory that a capture leaves free, because the application treats less as out of memory.
    """

    budget_bytes: int = 4096 * _MIB
    capture: bool = True
    verify: bool = False
    store_folder: Path | None = None
    store_bytes: int = 2048 * _MIB
    remember: bool = True
    workers: int | None = None
    source: str = ""
    application: str = ""
    trusted: frozenset[str] = frozenset()
    management_modules: frozenset[str] = frozenset()
    attention: str = ATTENTION[0]
    compile: str = COMPILE[0]
    attribute_policy: ModuleAttributePolicy = PLAIN
    spare_bytes: int = 0

    @staticmethod
    def from_environment(
        environment: Mapping[str, str] | None = None,
        device_bytes: int | None = None,
        store_folder: Path | None = None,
        source: str = "",
        application: str = "",
        management_modules: frozenset[str] = frozenset(),
        settings: Mapping[str, str] | None = None,
        attribute_policy: ModuleAttributePolicy = PLAIN,
    ) -> CacheConfig:
        """Read the RESOLUTE_* variables. Raises UserError for an invalid value.

        device_bytes: the GPU's memory; it limits the default budget.
        store_folder: the default folder; RESOLUTE_STORE can name another one or turn the store off.
        settings: values of variables that the environment does not set.
        """
        given = os.environ if environment is None else environment
        env = {**(settings or {}), **{name: text for name, text in given.items() if text.strip()}}
        defaults = CacheConfig()
        attention = _choice(env, "RESOLUTE_ATTENTION", ATTENTION)
        return CacheConfig(
            budget_bytes=_megabytes(env, "RESOLUTE_BUDGET_MB", default_budget(device_bytes)),
            capture=_flag(env, "RESOLUTE_CAPTURE", defaults.capture),
            verify=_flag(env, "RESOLUTE_VERIFY", defaults.verify),
            store_folder=_folder(env, "RESOLUTE_STORE", store_folder),
            store_bytes=_megabytes(env, "RESOLUTE_STORE_MB", defaults.store_bytes),
            remember=_flag(env, "RESOLUTE_REMEMBER", defaults.remember),
            workers=_number(env, "RESOLUTE_WORKERS", defaults.workers),
            source=source if attention == defaults.attention else f"{source}, {attention} attention",
            application=application,
            trusted=_names(env, "RESOLUTE_TRUSTED_CLASSES") | _packs(env, "RESOLUTE_TRUSTED_PACKS"),
            management_modules=management_modules,
            attention=attention,
            compile=_choice(env, "RESOLUTE_COMPILE", COMPILE),
            attribute_policy=attribute_policy,
        )


def default_budget(device_bytes: int | None) -> int:
    """Return the default limit of captures, in bytes, on a device with `device_bytes` of memory (None: unknown)."""
    most = CacheConfig().budget_bytes
    return most if device_bytes is None else min(most, device_bytes // _GPU_FRACTION)


def given_variables() -> dict[str, str]:
    """Return the RESOLUTE_* variables of this process's environment that are not empty."""
    return {name: text for name, text in os.environ.items() if name.startswith("RESOLUTE_") and text.strip()}


def _megabytes(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name, "").strip()
    if not text:
        return default
    if not (text.isascii() and text.isdigit()):
        raise UserError(f"{name}={text!r} is not a whole number of megabytes; for example {name}=4096.")
    return int(text) * _MIB


def _number(env: Mapping[str, str], name: str, default: int | None) -> int | None:
    text = env.get(name, "").strip()
    if not text:
        return default
    if not (text.isascii() and text.isdigit()):
        raise UserError(f"{name}={text!r} is not a whole number; for example {name}=4, or 0 for none.")
    return int(text)


def _folder(env: Mapping[str, str], name: str, default: Path | None) -> Path | None:
    text = env.get(name, "").strip()
    if text.lower() in ("0", "false", "off"):
        return None
    if text.lower() in ("", "1", "true", "on"):
        return default
    if not Path(text).is_absolute():
        raise UserError(f"{name}={text!r} is neither an absolute path of a folder nor on or off.")
    return Path(text)


def _names(env: Mapping[str, str], name: str) -> frozenset[str]:
    # ComfyUI names a pack's modules by their path, so an entry may contain any character but the comma.
    return frozenset(entry.strip() for entry in env.get(name, "").split(",") if entry.strip())


def _packs(env: Mapping[str, str], name: str) -> frozenset[str]:
    packs = _names(env, name)
    wrong = sorted(pack for pack in packs if _PACK.fullmatch(pack) is None)
    if wrong:
        raise UserError(f"{name}: {wrong[0]!r} is not name@version:digest; copy what the log says of this pack.")
    return packs


def _choice(env: Mapping[str, str], name: str, choices: tuple[str, ...]) -> str:
    text = env.get(name, "").strip().lower() or choices[0]
    if text not in choices:
        raise UserError(f"{name}={text!r} is none of {', '.join(choices)}.")
    return text


def _flag(env: Mapping[str, str], name: str, default: bool) -> bool:
    text = env.get(name, "").strip().lower()
    if not text:
        return default
    if text not in ("0", "1", "true", "false", "on", "off"):
        raise UserError(f"{name}={text!r} is neither on nor off; use 1 or 0.")
    return text in ("1", "true", "on")
