"""The `transformer_options` that a block gets while it is traced.

A traced block must not see the caller's options: their values would be frozen into the region. It gets a mapping that
records every name that the block looks up. A call fits a region if its options give the same lookup results.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from .....compile_cache.errors import BypassCode, BypassReason
from ...comfyui import chosen_attention
from ...comfyui.transformer_options import OVERRIDE, PATCHES, Meaning, names_of
from ...trust.core_code import is_patch_of_core
from ..common import traced_attention

_NESTED, _KEYED, _PASSED_ON = map(names_of, (Meaning.PATCHES, Meaning.KEYED, Meaning.PASSED_ON))

Path = tuple[str, ...]
Lookup = tuple[Any, ...]
Reads = dict[Path, Lookup]  # the result of each lookup of a block

_ABSENT: Lookup = ("absent",)
_PRESENT: Lookup = ("present",)
_REFUSED: Lookup = ("other",)  # a value that no block may read


class RefusedOptionError(Exception):
    """A block reads an option that no region may depend on, or writes to the caller's options."""

    def __init__(self, reason: BypassReason) -> None:
        super().__init__(reason.detail)
        self.reason = reason


def classify(options: Mapping[str, Any], path: Path) -> Lookup:
    """Classify an option of a call: absent, a value of the key, present (may be passed on), patched, or refused.

    An attention override is absent if it is torch's; otherwise its value is the name of core's function.
    """
    try:
        return _classify(options, path)
    except Exception:  # noqa: BLE001 (of the code of a class of anybody's)
        return _REFUSED


def _classify(options: Mapping[str, Any], path: Path) -> Lookup:
    name = path[0]
    if name == OVERRIDE:
        chosen = chosen_attention.attention_of(options)
        return _REFUSED if chosen is None else _ABSENT if chosen == chosen_attention.TORCHS else ("value", chosen)
    if name in _NESTED:
        given = (options.get(name) or {}).get(path[1]) if len(path) > 1 else None
        if not given:
            return _ABSENT if len(path) > 1 else _PRESENT
        is_cut = name == PATCHES and type(given) is list and all(map(is_patch_of_core, given))
        return ("patched", len(given)) if is_cut else _REFUSED
    if name not in options:
        return _ABSENT
    value = options[name]
    if value is None or (name in _KEYED and type(value) in (bool, int, str)):
        return ("value", value, type(value))  # a block may tell 1 from True
    return _PRESENT if name in _PASSED_ON else _REFUSED


def fits(options: Mapping[str, Any], reads: Reads) -> bool:
    """These options give a block the lookup results that are recorded in `reads`."""
    return all(classify(options, path) == seen for path, seen in reads.items())


class BlockOptions(dict[str, Any]):
    """transformer_options for a block. They record its lookups in `reads`.

    given: the options of a call. None: lookups are answered from `reads`, and any other one is refused.
    """

    def __init__(
        self, kind: str, reads: Reads, given: Mapping[str, Any] | None = None, path: Path = (), at_cut: Any = None
    ) -> None:
        """kind: the class of the block, for messages. path: the names that lead from the root of the options to here.

        at_cut: called in place of a patch, with (kind, number) of the patch before its arguments.
        """
        super().__init__()
        self._kind = kind
        self._reads = reads
        self._at_cut = at_cut
        self._given = given
        self._path = path
        self._is_copy = False
        self.own: dict[str, Any] = {}  # entries that the block wrote to its own copy

    def _find(self, name: str) -> Any:
        """The value under a name, or `_ABSENT`. Raises RefusedOptionError."""
        if name in self.own:
            return self.own[name]
        path = (*self._path, name)
        if self._given is None:
            seen = self._reads.get(path)
            if seen is None:
                raise RefusedOptionError(self._reason(path, "reads"))
        else:
            seen = self._reads[path] = classify(self._given, path)
        if seen == _REFUSED:
            raise RefusedOptionError(self._reason(path, "reads"))
        if path == (OVERRIDE,):
            return traced_attention if seen == _ABSENT else functools.partial(chosen_attention.run, seen[1])
        if path[0] in _NESTED and len(path) == 1:
            return BlockOptions(self._kind, self._reads, self._given, path, self._at_cut)
        if seen[0] == "patched":
            return [functools.partial(self._at_cut, (path[1], number)) for number in range(seen[1])]
        if seen == _PRESENT:
            return Placeholder(self._reason(path, "uses"))
        return seen[1] if seen[0] == "value" else _ABSENT

    def _reason(self, path: Path, verb: str) -> BypassReason:
        if path == (OVERRIDE,):
            text = f"{chosen_attention.why_unknown(self._given or {})}; transformer blocks run eagerly"
        elif path[0] in _NESTED and len(path) > 1:
            text = f"another node patches {path[1]} inside transformer blocks; they run eagerly"
        else:
            text = f"{self._kind} {verb} '{path[0]}' of transformer_options; such blocks run eagerly"
            return BypassReason(BypassCode.OBSERVED_INPUT, text)
        return BypassReason(BypassCode.PATCHED_BLOCK, text)

    def get(self, name: str, default: Any = None) -> Any:
        found = self._find(name)
        return default if found is _ABSENT else found

    def __getitem__(self, name: str) -> Any:
        found = self._find(name)
        if found is _ABSENT:
            raise KeyError(name)
        return found

    def __contains__(self, name: object) -> bool:
        return self._find(str(name)) is not _ABSENT

    def copy(self) -> BlockOptions:
        copied = BlockOptions(self._kind, self._reads, self._given, self._path, self._at_cut)
        copied._is_copy = True
        copied.own = dict(self.own)
        return copied

    def __setitem__(self, name: str, value: Any) -> None:
        if not self._is_copy:
            raise RefusedOptionError(self._reason((*self._path, name), "writes"))
        self.own[name] = value

    def _as_a_whole(self, *args: Any, **kwargs: Any) -> NoReturn:
        text = f"{self._kind} reads transformer_options as a whole; such blocks run eagerly"
        raise RefusedOptionError(BypassReason(BypassCode.OBSERVED_INPUT, text))

    def __iter__(self) -> Iterator[str]:
        self._as_a_whole()

    __len__ = __delitem__ = __eq__ = __or__ = keys = values = items = update = setdefault = _as_a_whole
    pop = popitem = clear = __ror__ = __ior__ = __reversed__ = _as_a_whole
    __hash__ = None

    def __bool__(self) -> bool:
        return True


def replaying_patches(options: Mapping[str, Any], answers: list[Any]) -> dict[str, Any]:
    """Options whose patches first return these answers, in order, so that no patch that already ran runs again."""

    def answering(patch: Any) -> Any:
        return lambda *args, **kwargs: answers.pop(0) if answers else patch(*args, **kwargs)

    patches = options[PATCHES]
    return {**options, PATCHES: {kind: [answering(each) for each in patches[kind]] for kind in patches}}


class Placeholder:
    """Replaces a value that a block may only pass on. Any other use raises RefusedOptionError."""

    def __init__(self, reason: BypassReason) -> None:
        self._reason = reason

    def _refuse(self, *args: Any) -> NoReturn:
        raise RefusedOptionError(self._reason)

    __bool__ = __eq__ = __ne__ = __hash__ = __lt__ = __le__ = __gt__ = __ge__ = __len__ = __iter__ = _refuse
    __getitem__ = __contains__ = __int__ = __float__ = __index__ = __add__ = __radd__ = __sub__ = _refuse
    __rsub__ = __mul__ = __rmul__ = __mod__ = __floordiv__ = __truediv__ = __neg__ = __call__ = __format__ = _refuse
    __str__ = __repr__ = _refuse
    __class__ = property(_refuse)

    def __getattr__(self, name: str) -> NoReturn:
        self._refuse()
