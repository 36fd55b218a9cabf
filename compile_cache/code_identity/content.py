"""Code and settings as plain data, by content: equal in every process that has the same code and settings.

A function's data contain its bytecode, constants, names and defaults, and the values that it closes over. They contain
no file name, no line number, no address, and nothing whose order depends on the seed of Python's hashes.

A value is described completely, or is known to compute nothing, or is unknown and counts as equal to no other value.
"""

from __future__ import annotations

import collections
import copyreg
import ctypes
import enum
import functools
import hashlib
import logging
import struct
import threading
import types
import weakref
from collections.abc import Iterable
from types import BuiltinFunctionType, CodeType, FunctionType, MemberDescriptorType, ModuleType
from typing import Any

import torch

from ..keys import repr_digest
from .functions import CONSISTS_OF, CONTAINERS, CUSTOM_OPERATOR, PLAIN, attributes_read, cells_of, class_code
from .names import NATIVE, name_of_class, package_of

TORCH_OWN = frozenset(vars(torch.nn.Module())) - {"training"}
_LISTS = frozenset({tuple, list, torch.Size})
_NUMBERS = frozenset({bool, int, float, str})
_DEEPEST = 60  # values within values
_MOST = 5_000  # values in one value
_MOST_NUMBERS = 1 << 20  # of a tensor described by content; a trace takes no larger ones but inputs and weights
_MOST_CODES = 50_000
_CHARS = 32  # hexadecimal digits of a digest

# Objects of these classes do not affect the computation. They are described by their class.
_INERT = (
    logging.Logger, threading.Thread, threading.Condition, threading.Event, type(threading.Lock()),
    type(threading.RLock()), ctypes.CDLL, types.GenericAlias, types.UnionType,
)  # fmt: skip
_INERT_PACKAGES = frozenset({"_abc", "_weakref", "_weakrefset", "typing", "typing_extensions", "weakref"})
_INERT_OF_TORCH = frozenset({"Event", "ExternalStream", "Stream"})
_RANDOM = ("_random", "random", "numpy.random")  # each call may draw other numbers from such objects
# Written in C, and described by their names.
_BY_NAME = (
    types.MemberDescriptorType, types.GetSetDescriptorType, types.MethodDescriptorType, types.WrapperDescriptorType,
    types.ClassMethodDescriptorType,
)  # fmt: skip
_CONSISTS_OF = (
    (BuiltinFunctionType, ("__module__", "__qualname__", "__self__")),
    (types.MethodWrapperType, ("__qualname__", "__self__")),
    *CONSISTS_OF,
)
_WRAPPERS = {CUSTOM_OPERATOR: "_init_fn", "JITFunction": "fn", "Autotuner": "fn"}  # of torch.library and triton
_REDUCERS = ("__reduce__", "__reduce_ex__", "__getstate__", "__getnewargs__", "__getnewargs_ex__")
_TEXTS: tuple[Any, ...] = (int, float, complex, str, bytes)
_OF_A_CLASS = frozenset({"__dict__", "__weakref__", "__doc__", "__module__", "__firstlineno__"})
_MADE_BY_CODE = 1 << 9  # Py_TPFLAGS_HEAPTYPE

# By function: the addresses of its defaults, and the numbers of those that were empty containers when first seen.
_first_seen: weakref.WeakKeyDictionary[FunctionType, tuple[list[int], set[int]]] = weakref.WeakKeyDictionary()
# Digested code objects, by address. They are kept alive, so that an address always means the same code object.
_digests: dict[int, tuple[CodeType, str]] = {}


def code_digest(code: CodeType) -> str:
    """Return the digest of a code object and of those nested in it."""
    known = _digests.get(id(code))
    if known is not None:
        return known[1]
    if len(_digests) >= _MOST_CODES:
        _digests.clear()
    arguments = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    raises = getattr(code, "co_exceptiontable", b"")  # since Python 3.11
    digest = repr_digest((code.co_code, raises, arguments, names, list(map(_constant, code.co_consts))))[:_CHARS]
    _digests[id(code)] = (code, digest)
    return digest


@functools.lru_cache(maxsize=64)
def class_digest(kind: type) -> str:
    """Return the digest of the functions that are written in a class and its bases."""
    return repr_digest([code_digest(function.__code__) for function in class_code((kind,))])[:_CHARS]


def described(value: Any, unknown: list[str] | None = None) -> object:
    """Return a value as plain data. Other values have other data, unless a class was added to `unknown`."""
    kind = type(value)
    if kind in _NUMBERS or (kind in _LISTS and _NUMBERS.issuperset(map(type, value))):
        try:
            return (kind.__name__, repr(value))
        except ValueError:  # a number of too many digits, which `of` refuses
            pass
    return _Description([] if unknown is None else unknown).of(value)


class _Description:
    """Describes one value. It raises nothing, even if the value's own code raises."""

    def __init__(self, unknown: list[str]) -> None:
        self._unknown = unknown
        self._within: dict[int, int] = {}  # the values that contain the present one, by address: their level
        self._left = _MOST

    def of(self, value: Any) -> object:
        kind = type(value)
        if kind in PLAIN or (kind in _LISTS and _NUMBERS.issuperset(map(type, value))):
            try:
                return (kind.__name__, repr(value))
            except ValueError:
                return self._refuse(kind)
        level = self._within.get(id(value))
        if level is not None:
            return ("within", len(self._within) - level)
        self._left -= 1
        self._within[id(value)] = len(self._within)
        try:
            if self._left < 0 or len(self._within) > _DEEPEST:
                return self._refuse(kind)
            return self._parts(value, kind)
        except Exception:  # noqa: BLE001 (of a class of anybody's)
            return self._refuse(kind)
        finally:
            del self._within[id(value)]

    def _refuse(self, kind: type) -> object:
        self._unknown.append(str(type.__dict__["__name__"].__get__(kind)))
        return ("unknown", self._unknown[-1])

    def _each(self, values: Iterable[Any]) -> list[object]:
        return [self.of(each) for each in values]

    def _parts(self, value: Any, kind: type) -> object:
        if issubclass(kind, type):
            return self._class(value, kind)
        if kind is FunctionType:
            return self._function(value)
        if kind is dict:
            return ("dict", [(self.of(key), self.of(item)) for key, item in value.items()])
        if kind in CONTAINERS:
            items = self._each(value)
            return (kind.__name__, items if kind in _LISTS else _sorted(items))
        if issubclass(kind, torch.nn.Module):
            return self._module(value, kind)
        if issubclass(kind, torch.Tensor):
            return self._tensor(value, kind)
        if issubclass(kind, enum.Enum):
            return ("enum", name_of_class(kind), value._name_, self.of(value._value_))
        if issubclass(kind, ModuleType):
            return ("module", value.__name__)
        if issubclass(kind, _BY_NAME):
            return (kind.__name__, name_of_class(value.__objclass__), value.__name__)
        if kind is CodeType:
            return ("code", code_digest(value))
        if kind.__module__ == type(torch.ops).__module__:
            return ("operator", str(value))
        package = package_of(kind.__module__)
        of_torch = package == "torch" and (kind.__name__ in _INERT_OF_TORCH or "_dynamo" in kind.__module__)
        if of_torch or issubclass(kind, _INERT) or kind.__name__ == "_FuncPtr" or package in _INERT_PACKAGES:
            return ("inert", name_of_class(kind))
        for base, names in _CONSISTS_OF:
            if issubclass(kind, base):
                return (name_of_class(kind), [self.of(getattr(value, name, None)) for name in names])
        if kind.__name__ in _WRAPPERS and package in ("torch", "triton"):
            return (kind.__name__, self.of(getattr(value, _WRAPPERS[kind.__name__])))
        return (name_of_class(kind), self._attributes(value, kind), self._payload(value, kind))

    def _class(self, value: Any, kind: type) -> object:
        """Describe a class by name; one defined in a function also by content, since each call may make another one."""
        if "<locals>" not in value.__qualname__:
            return (kind.__name__, name_of_class(value))
        held = [(name, self.of(each)) for name, each in vars(value).items() if name not in _OF_A_CLASS]
        return (kind.__name__, name_of_class(value), self._each(value.__bases__), held)

    def _function(self, value: FunctionType) -> object:
        home, code = str(value.__globals__.get("__name__")), value.__code__
        named = value.__kwdefaults__ or {}
        given = [*(value.__defaults__ or ()), *named.values()]
        empty = _empty(value, given) if given else ()
        defaults = [() if number in empty else self.of(each) for number, each in enumerate(given)]
        cells = zip(code.co_freevars, cells_of(value), strict=True) if value.__closure__ else ()
        closed_over = [self._cell(code, *each) for each in cells]
        # torch keeps numbers there that differ from process to process.
        own = {} if package_of(home) in NATIVE else vars(value)
        held = [(name, self.of(each)) for name, each in own.items() if not name.startswith("_torch")]
        return ("function", home, code_digest(code), tuple(named), defaults, closed_over, held)

    def _cell(self, code: CodeType, variable: str, value: Any) -> object:
        """Describe an enclosing function's variable. If the code reads only settings of a module, only these count."""
        read = attributes_read(code, variable) if isinstance(value, torch.nn.Module) else None
        if read is None or any(hasattr(type(value), name) for name in read):  # a method's code may do anything
            return self.of(value)
        return (name_of_class(type(value)), [(name, self.of(getattr(value, name, None))) for name in sorted(read)])

    def _module(self, value: torch.nn.Module, kind: type) -> object:
        """Describe a module. A trace takes no values of its weights, so these count by shape and dtype."""
        own = [(name, self.of(each)) for name, each in vars(value).items() if name not in TORCH_OWN]
        weights = {**value._parameters, **value._buffers}
        shapes = [(name, str(each.shape), str(each.dtype)) for name, each in weights.items() if each is not None]
        parts = [(name, self.of(each)) for name, each in value._modules.items()]
        hooks = self._each([*value._forward_hooks.values(), *value._forward_pre_hooks.values()])
        return (name_of_class(kind), own, shapes, parts, hooks)

    def _tensor(self, value: torch.Tensor, kind: type) -> object:
        if kind not in (torch.Tensor, torch.nn.Parameter) or value.layout != torch.strided:
            return self._refuse(kind)
        form = (kind.__name__, tuple(value.shape), str(value.dtype), value.device.type)
        if value.numel() > _MOST_NUMBERS or value.is_meta:
            return form
        content = value.detach().resolve_conj().resolve_neg().cpu().contiguous().view(-1).view(torch.uint8)
        return (*form, hashlib.sha256(content.numpy().tobytes()).hexdigest())

    def _attributes(self, value: Any, kind: type) -> object:
        """Describe an object's dictionary and slots."""
        own = object.__getattribute__(value, "__dict__") if kind.__dictoffset__ else {}
        is_state = package_of(kind.__module__) == "torch"  # contexts keep the state from before they were entered
        held = [(name, self.of(each)) for name, each in own.items() if not (is_state and name.startswith("prev"))]
        for name, member in _members(kind):
            try:
                held.append((name, self.of(member.__get__(value, kind))))
            except AttributeError:  # an empty slot
                held.append((name, None))
        return held

    def _payload(self, value: Any, kind: type) -> object:
        """Describe an object's data beside its attributes: its number or text, its items, or its reduced state."""
        for base in _TEXTS:
            if issubclass(kind, base):
                return base.__repr__(value)
        for base in (collections.OrderedDict, dict):
            if issubclass(kind, base):
                made = self.of(getattr(value, "default_factory", None))
                return (made, [(self.of(key), self.of(item)) for key, item in base.items(value)])
        for base in (tuple, list, set, frozenset):
            if issubclass(kind, base):
                items = self._each(base.__iter__(value))
                return items if base in _LISTS else _sorted(items)
        places = len(_members(kind)) + (kind.__dictoffset__ > 0) + (kind.__weakrefoffset__ > 0)
        if not kind.__itemsize__ and kind.__basicsize__ == object.__basicsize__ + struct.calcsize("P") * places:
            return None  # a pure Python object, which has nothing but its attributes
        if _is_secretive(kind) or getattr(value, "nbytes", 0) > _MOST_NUMBERS:
            return self._refuse(kind)
        reduce = copyreg.dispatch_table.get(kind)
        told: Any = reduce(value) if reduce else value.__reduce_ex__(2)
        return told if isinstance(told, str) else self._each(list(x) if hasattr(x, "__next__") else x for x in told[1:])


def _members(kind: type) -> list[tuple[str, Any]]:
    """Return the slots of a class. Members of classes written in C are left out, since they may be addresses."""
    inside = [item for base in kind.__mro__ if base.__flags__ & _MADE_BY_CODE for item in vars(base).items()]
    return [(name, each) for name, each in inside if type(each) is MemberDescriptorType]


def _is_secretive(kind: type) -> bool:
    """True for an iterator, whose position moves; for random numbers; and if a pack's code reports the state."""
    told = [vars(base).get(name) for base in kind.__mro__ for name in _REDUCERS]
    by_a_pack = any(package_of(each.__module__) not in NATIVE for each in told if type(each) is FunctionType)
    return by_a_pack or hasattr(kind, "__next__") or kind.__module__.startswith(_RANDOM) or kind is torch.Generator


def _empty(function: FunctionType, given: list[Any]) -> set[int]:
    """Return the numbers of the defaults that were empty containers when first seen. They always count as empty,
    because core's code writes into its `transformer_options={}`.
    """
    objects = list(map(id, given))
    known, found = _first_seen.get(function, ([], set()))
    if known != objects:
        found = {number for number, each in enumerate(given) if type(each) in (list, set, dict) and not each}
        _first_seen[function] = (objects, found)
    return found


def _constant(value: Any) -> object:
    if isinstance(value, CodeType):
        return ("code", code_digest(value))
    if isinstance(value, tuple):
        return ("tuple", [_constant(item) for item in value])
    if isinstance(value, frozenset):
        return ("set", _sorted(_constant(item) for item in value))
    return (type(value).__name__, repr(value))


def _sorted(items: Iterable[object]) -> list[str]:
    return sorted(map(repr, items))
