"""Decide whose classes may be compiled and captured: ComfyUI's, a declared pack's, and classes that the user named."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Collection, Iterable
from types import FunctionType
from typing import Any

import torch

from ....compile_cache.code_identity.authors import author_of, is_written_for
from ....compile_cache.code_identity.content import described
from ....compile_cache.code_identity.names import full_name
from ....compile_cache.code_identity.reach import exchanged
from ....compile_cache.config import CacheConfig
from ....compile_cache.errors import BypassCode, BypassReason
from ....compile_cache.keys import repr_digest
from ....compile_cache.modules.site import Bypass, Hook
from ....compile_cache.modules.slots import all_parts
from ....compile_cache.modules.structure import parts
from .declared import ATTENTION, CLASSES
from .packs import KNOWN_PACKAGES, Pack, files_of, foreign_packages, matches_declared, pack_of, top_package

# Weak, since a class may reference a model. Values: the declared packs and classes that a verdict assumed, the verdict.
_trusts: weakref.WeakKeyDictionary[type, tuple[frozenset[str], bool]] = weakref.WeakKeyDictionary()


def why_untrusted(block: torch.nn.Module) -> BypassReason | None:
    """Why a block must run eagerly: code other than core's may compute anything. None if it may be a region."""
    kind = type(block)
    if "forward" in vars(block) or not is_written_for(kind.forward, kind, KNOWN_PACKAGES):
        text = f"another pack replaced the forward of {kind.__name__}; such blocks run eagerly"
        return BypassReason(BypassCode.REPLACED_FORWARD, text)
    return _why_eager(set(map(type, all_parts(block))), kind.__name__)


def trusted_hooks(hooks: Iterable[Hook], bypass: Bypass) -> list[Hook]:
    """The hooks whose blocks have only parts of trusted classes; others get a bypass. A pack may replace a Linear."""
    trusted = []
    for hook in hooks:
        kinds = {type(part) for site in hook.sites for _, part in parts(site.module, site.without)}
        reason = _why_eager(kinds, hook.labels[0][0].partition(".")[0])
        if reason is None:
            trusted.append(hook)
        else:
            bypass(reason)
    return trusted


def _why_eager(kinds: Collection[type], block: str) -> BypassReason | None:
    """Why blocks with parts of these classes must run eagerly. block: their name, for people."""
    if code := exchanged(kinds):
        text = f"another pack replaced {code[0]}; {block} blocks run eagerly"
        return BypassReason(BypassCode.REPLACED_FORWARD, text)
    why = why_foreign(kinds, _trusted())
    if why is None:
        return None
    return BypassReason(BypassCode.FOREIGN_MODEL, f"{block} blocks run eagerly: {why}")


def why_foreign(kinds: Iterable[type], trusted: Collection[str]) -> str | None:
    """Why not all of these classes are trusted, as a sentence without its full stop. None if they are.

    trusted: "module.Class" of classes that the user named, and "name@version:digest" of packs that the user declared
    (RESOLUTE_TRUSTED_CLASSES, RESOLUTE_TRUSTED_PACKS). `CLASSES` is trusted besides. The bases of a class must be
    trusted too, unless the user named the class.
    """
    for name, kind in sorted({full_name(kind): kind for kind in kinds}.items()):
        if name in trusted:
            continue
        for package in foreign_packages(kind):
            pack = pack_of(package)
            if pack is None:
                return f"another pack wrote {name}; you can name that class in RESOLUTE_TRUSTED_CLASSES"
            pieces = CLASSES.get(pack.name.casefold(), ())
            is_known = files_of(kind, package) <= {piece.file for piece in pieces}
            if str(pack) in trusted or (is_known and matches_declared(package, pieces)):
                continue
            if is_known or any(entry.startswith(f"{pack.name}@") for entry in trusted):
                return _changed(pack)
            text = f"another pack wrote {name}; you can name that class in RESOLUTE_TRUSTED_CLASSES, or its pack in"
            return f"{text} RESOLUTE_TRUSTED_PACKS={pack}"
    return None


def _changed(pack: Pack) -> str:
    return f"{pack.name} changed since it was declared; now it is RESOLUTE_TRUSTED_PACKS={pack}"


def attention_of_pack(function: Any) -> tuple[str, str]:
    """(name, reason) of a pack's function that replaces core's attention. The reason says why it has no name.

    The name consists of the pack, the function and a digest of its content, or it is the name of one of core's
    functions, see `ATTENTION`. Both are empty for a function that nobody declared.
    """
    return _attention_of_pack(function, _trusted()) if type(function) is FunctionType else ("", "")


@functools.lru_cache(maxsize=64)
def _attention_of_pack(function: FunctionType, trusted: frozenset[str]) -> tuple[str, str]:
    package = top_package(author_of(function))
    pack = pack_of(package) if package else None
    known = None if pack is None else ATTENTION.get(pack.name.casefold(), {}).get(function.__qualname__)
    if pack is None or known is None:
        return "", ""
    if str(pack) not in trusted and not matches_declared(package, known.pieces):
        return "", _changed(pack)
    unknown: list[str] = []
    content = repr_digest(described(function, unknown))[:32]
    if unknown and not known.calls:
        return "", f"{pack.name} gives it a {unknown[0]}"
    return known.calls or f"{pack.name}:{function.__name__}:{content}", ""


def is_trusted(kind: type) -> bool:
    """The class and its bases are ComfyUI's or a declared pack's, or the user named the class."""
    trusted = _trusted()
    known = _trusts.get(kind)
    if known is None or known[0] is not trusted:
        known = _trusts[kind] = (trusted, why_foreign((kind,), trusted) is None)
    return known[1]


@functools.cache
def _trusted() -> frozenset[str]:
    # These are variables only, not settings of the dialog: a request could write those.
    return CacheConfig.from_environment().trusted
