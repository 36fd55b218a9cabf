"""What onediff 1.2.0 expects of OneFlow and public OneFlow 0.9.0 does not have.

onediff turns a torch module into a OneFlow one by importing the package of its classes a second time, with OneFlow in
the place of torch. Its own OneFlow brings the importer for that; this file is ours, for as long as a conversion takes.
`sys.modules`, `sys.meta_path`, `sys.path`, `builtins`, `os.environ` and the warning filters are afterwards what they
were. While it lasts, another thread that imports torch anew would get OneFlow's; so it happens once per module.
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

import torch

from .operators import MAPPED
from .packages import oneflow, undisturbed

# Slow to import, and not used by a conversion; onediff goes on without them.
_UNUSED = ("diffusers",)


class Missing:
    """Stands for what OneFlow does not have, as long as it is only named, compared or used to decorate."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

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


class _TorchModule(types.ModuleType):
    """A module under torch's name that answers with OneFlow's attributes."""

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
    """Finds torch, which is OneFlow here, and those modules of a package that stay the real ones."""

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
            module.__spec__ = own.loader_state  # the import system has just put ours there


class Importer:
    """Switches between the real torch, with a package that was imported with it, and OneFlow in its place."""

    def __init__(self) -> None:
        self.enable = False
        # onediff would look through the modules named here, attribute by attribute, for what other packs replaced in
        # them, for half a minute. Such a pack's module gets a wrong answer, and so no graph.
        self.delete_list: list[str] = []
        self._packages = {"torch"}  # those that were ever imported with OneFlow: they change places together
        self._mocked: dict[str, types.ModuleType] = {}
        self._finder = _Finder()

    @contextmanager
    def enabled(self, main_pkg: str = "", **_: Any) -> Iterator[None]:
        """In this block torch is OneFlow, and `main_pkg` is imported with it. Nested blocks change nothing."""
        if self.enable:
            yield
            return
        self._packages |= {main_pkg} - {""}
        real = _taken_out(self._packages)
        # What knows nothing of torch stays the real one: settings, above all.
        self._finder.kept = {
            name: module
            for name, module in real.items()
            if not _is_below(name, "torch") and not hasattr(module, "__path__") and not _knows_torch(module)
        }
        sys.modules.update(self._mocked)
        sys.meta_path.insert(0, self._finder)
        self.enable = True
        try:
            yield
        finally:
            self.enable = False
            sys.meta_path.remove(self._finder)
            self._mocked.update(_taken_out(self._packages))
            sys.modules.update(real)


def _taken_out(packages: Iterable[str]) -> dict[str, types.ModuleType]:
    """These packages, with all that is below them, removed from sys.modules."""
    names = [name for name in sys.modules if name.partition(".")[0] in packages]
    return {name: sys.modules.pop(name) for name in names}


class ArgsTree:
    """Nested arguments, of which onediff wants the nodes and a copy with other leaves."""

    def __init__(self, value: Any, gen_name: bool = True, root_prefix: str = "", **_: Any) -> None:
        self._value = value

    def iter_nodes(self) -> Iterator[Any]:
        yield from _nodes(self._value)

    def map_leaf(self, function: Callable[[Any], Any]) -> Any:
        return _leaves_mapped(self._value, function)


_importer = Importer()


@contextmanager
def layer() -> Iterator[None]:
    """Everything that onediff needs is there in this block, and gone after it."""
    modules = _layer_modules()
    before = {name: sys.modules.get(name) for name in (*modules, *_UNUSED)}
    path, hasattr_, meta_path = list(sys.path), builtins.hasattr, list(sys.meta_path)
    oneflow()
    mock_torch = importlib.import_module("oneflow.mock_torch")
    enable = mock_torch.enable
    with undisturbed(), warnings.catch_warnings():
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
    """Import these modules with OneFlow in the place of torch, so that the conversion itself imports nothing.

    In a thread of its own: something that is imported keeps the frames that imported it, and through them whatever they
    and their callers hold. Here that is nothing; in a conversion it would be the model, and our graph of it.
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
def extended() -> Iterator[None]:
    """OneFlow has the operators of torch that ComfyUI's models call and it lacks, in this block."""
    flow = oneflow()
    functional = flow.nn.functional
    additions = [
        (flow.Tensor, "movedim", lambda x, source, target: MAPPED["aten.movedim.int"](x, source, target)),
        (flow.Tensor, "unflatten", lambda x, dim, sizes: MAPPED["aten.unflatten.int"](x, dim, sizes)),
        (functional, "group_norm", MAPPED["aten.group_norm.default"]),
        # onediff brings one of its own, which divides by the scale where it has a mask.
        (functional, "scaled_dot_product_attention", MAPPED["aten.scaled_dot_product_attention.default"]),
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


def _layer_modules() -> dict[str, types.ModuleType]:
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


def _knows_torch(module: Any) -> bool:
    """Whether a module uses torch by itself: then it has to be imported again, with OneFlow."""
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
