"""What onediff 1.2.0 needs and public OneFlow 0.9.0 lacks, so that tests can run the real packages: above all an
importer that replaces torch with OneFlow.

onediff converts a torch module by importing the package of its classes a second time, with OneFlow in place of torch.
onediff's own OneFlow has an importer for that; this module provides one for the duration of a conversion.
Afterwards `sys.modules`, `sys.meta_path`, `sys.path`, `builtins`, `os.environ` and the warning filters are restored.
During a conversion, another thread that newly imports torch would get OneFlow, so each module is converted only once.
"""

from __future__ import annotations

import builtins
import importlib
import importlib.abc
import importlib.machinery
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from compile_cache.backends.oneflow import onediff
from compile_cache.backends.oneflow.operators import MAPPED
from compile_cache.backends.oneflow.packages import oneflow, process_state_restored
from compile_cache.foreign.names import modules_of

# Slow to import and not needed for a conversion; onediff works without them.
_UNUSED = ("diffusers",)


class Missing:
    """Placeholder for a name that OneFlow lacks; it may be named, compared, inherited from or used as a decorator."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __repr__(self) -> str:
        return f"<OneFlow has no {self.__name__}>"

    def __getattr__(self, name: str) -> Missing:
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(f"{self.__name__}.{name}")

    def __call__(self, *arguments: Any, **_: Any) -> Any:
        if len(arguments) == 1 and (isinstance(arguments[0], type) or callable(arguments[0])):
            return arguments[0]
        return Missing(f"{self.__name__}()")

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return ()

    def __bool__(self) -> bool:
        return False

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __enter__(self) -> Missing:
        return self

    def __exit__(self, *_: object) -> None: ...

    def __lt__(self, other: object) -> bool:
        return False

    __le__ = __gt__ = __ge__ = __lt__

    def __or__(self, other: object) -> object:
        return other

    __ror__ = __or__


def supply(patched: pytest.MonkeyPatch) -> None:
    """Make the product's two calls of onediff run on public OneFlow."""
    convert, run = onediff.convert, onediff.run

    def converted(module: torch.nn.Module) -> Any:
        with onediff_supported():
            preload(modules_of(module.modules()))
            return convert(module)

    def result(*arguments: Any) -> list[Any]:
        with operators_added():
            return run(*arguments)

    patched.setattr(onediff, "convert", converted)
    patched.setattr(onediff, "run", result)


class _TorchModule(types.ModuleType):
    """A module named like torch's, with OneFlow's attributes."""

    def __init__(self, name: str, source: Any) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self._source = source

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if self.__name__ == "torch" and name == "version":
            return torch.version
        found = getattr(self._source, name, None)
        path = f"{self.__name__}.{name}"
        if isinstance(found, types.ModuleType):
            return sys.modules.get(path) or _TorchModule(path, found)
        return Missing(path) if found is None else found


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports OneFlow under torch's name, and returns the real module for the names in `kept`."""

    def __init__(self) -> None:
        self.kept: dict[str, types.ModuleType] = {}

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if _is_below(name, "torch"):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return importlib.machinery.ModuleSpec(name, self) if name in self.kept else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        if spec.name in self.kept:
            spec.loader_state = self.kept[spec.name].__spec__
            return self.kept[spec.name]
        try:
            source: Any = importlib.import_module("oneflow" + spec.name.removeprefix("torch"))
        except ImportError:
            source = Missing(spec.name)
        module = _TorchModule(spec.name, source)
        if spec.name == "torch":
            module.__version__ = torch.__version__  # type: ignore[attr-defined]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        own = module.__spec__
        if module.__name__ in self.kept and own is not None:
            module.__spec__ = own.loader_state  # the import system has just set our spec; restore the real one


class Importer:
    """Switches between the packages imported with the real torch and those imported with OneFlow in its place."""

    def __init__(self) -> None:
        self.enable = False
        # onediff would scan the modules named here for attributes that other packs replaced, which takes half a minute.
        # Without the scan, a module that such a pack changed gets a wrong result, so the check refuses its graph.
        self.delete_list: list[str] = []
        self._packages = {"torch"}  # every package imported with OneFlow so far; all are switched together
        self._mocked: dict[str, types.ModuleType] = {}
        self._finder = _Finder()

    @contextmanager
    def enabled(self, main_pkg: str = "", **_: Any) -> Iterator[None]:
        """In this block, `torch` is OneFlow, and `main_pkg` is imported with it. Nested blocks change nothing."""
        if self.enable:
            yield
            return
        self._packages |= {main_pkg} - {""}
        real = _pop_modules(self._packages)
        # Modules that do not use torch keep their real instance, above all those that hold settings.
        self._finder.kept = {
            name: module
            for name, module in real.items()
            if not _is_below(name, "torch") and not hasattr(module, "__path__") and not _uses_torch(module)
        }
        sys.modules.update(self._mocked)
        sys.meta_path.insert(0, self._finder)
        self.enable = True
        try:
            yield
        finally:
            self.enable = False
            sys.meta_path.remove(self._finder)
            self._mocked.update(_pop_modules(self._packages))
            sys.modules.update(real)


def _pop_modules(packages: Iterable[str]) -> dict[str, types.ModuleType]:
    """Remove these packages and their submodules from `sys.modules` and return them."""
    names = [name for name in sys.modules if name.partition(".")[0] in packages]
    return {name: sys.modules.pop(name) for name in names}


class ArgsTree:
    """Nested arguments. onediff iterates over the nodes and makes copies with mapped leaves."""

    def __init__(self, value: Any, gen_name: bool = True, root_prefix: str = "", **_: Any) -> None:
        self._value = value

    def iter_nodes(self) -> Iterator[Any]:
        yield from _nodes(self._value)

    def map_leaf(self, function: Callable[[Any], Any]) -> Any:
        return _leaves_mapped(self._value, function)


_importer = Importer()


@contextmanager
def onediff_supported() -> Iterator[None]:
    """In this block, OneFlow has the modules that onediff imports; at its end they are removed again."""
    modules = _onediff_modules()
    before = {name: sys.modules.get(name) for name in (*modules, *_UNUSED)}
    path, hasattr_, meta_path = list(sys.path), builtins.hasattr, list(sys.meta_path)
    oneflow()
    mock_torch = importlib.import_module("oneflow.mock_torch")
    enable = mock_torch.enable
    with process_state_restored(), warnings.catch_warnings():
        try:
            sys.modules.update(modules)
            for name in _UNUSED:
                sys.modules[name] = None  # type: ignore[assignment]
            mock_torch.enable = _importer.enabled  # type: ignore[attr-defined]
            yield
        finally:
            mock_torch.enable = enable  # type: ignore[attr-defined]
            builtins.hasattr = hasattr_
            sys.path[:], sys.meta_path[:] = path, meta_path
            for name, module in before.items():
                sys.modules.pop(name, None)
                if module is not None:
                    sys.modules[name] = module


def preload(names: Iterable[str]) -> None:
    """Import these modules with OneFlow in place of torch, so that the conversion itself imports nothing.

    Runs in its own thread: some imported module keeps the stack frames of its import alive, and with them everything
    that the callers hold. In a conversion, that would be the model and its graph.
    """
    with ThreadPoolExecutor(max_workers=1) as alone:
        alone.submit(_import_all, sorted(names)).result()


def _import_all(names: Sequence[str]) -> None:
    for name in names:
        package = name.partition(".")[0]
        if package not in ("torch", "__main__"):
            with _importer.enabled(main_pkg=package):
                importlib.import_module(name)


@contextmanager
def operators_added() -> Iterator[None]:
    """In this block, OneFlow has the torch operators that ComfyUI's models call and OneFlow lacks."""
    flow = oneflow()
    additions = [
        (flow.Tensor, "movedim", _movedim),
        (flow.Tensor, "unflatten", _unflatten),
        (flow.nn.functional, "group_norm", MAPPED["aten.group_norm.default"]),
    ]
    before = [(owner, name, vars(owner).get(name)) for owner, name, _ in additions]
    for owner, name, function in additions:
        setattr(owner, name, function)
    try:
        yield
    finally:
        for owner, name, own in before:
            if own is None:
                delattr(owner, name)
            else:
                setattr(owner, name, own)


def _movedim(x: Any, source: int, target: int) -> Any:
    order = [dim for dim in range(x.ndim) if dim != source % x.ndim]
    order.insert(target % x.ndim, source % x.ndim)
    return x.permute(*order)


def _unflatten(x: Any, dim: int, sizes: Sequence[int]) -> Any:
    dim %= x.ndim
    return x.reshape(*x.shape[:dim], *sizes, *x.shape[dim + 1 :])


def _onediff_modules() -> dict[str, types.ModuleType]:
    contents: Mapping[str, dict[str, Any]] = {
        "oneflow.framework.args_tree": {"ArgsTree": ArgsTree, "_is_dataclass": lambda value: False},
        "oneflow.mock_torch.mock_importer": {"_importer": _importer},
        "oneflow.mock_torch.mock_utils": {"MockEnableDisableMixin": types.SimpleNamespace(hazard_list=[])},
    }
    modules = {}
    for name, content in contents.items():
        modules[name] = types.ModuleType(name)
        vars(modules[name]).update(content)
    return modules


def _is_below(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def _uses_torch(module: Any) -> bool:
    """True if a module uses torch; then it must be imported again with OneFlow."""
    return any(
        value is torch or _is_below(str(getattr(value, "__module__", "")), "torch")
        for value in list(vars(module).values())
    )


def _nodes(value: Any) -> Iterator[Any]:
    yield value
    parts: Sequence[Any] = ()
    if isinstance(value, (list, tuple)):
        parts = value
    elif isinstance(value, dict):
        parts = list(value.values())
    for part in parts:
        yield from _nodes(part)


def _leaves_mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_leaves_mapped(part, function) for part in value)
    if isinstance(value, dict):
        return {key: _leaves_mapped(part, function) for key, part in value.items()}
    return function(value)
