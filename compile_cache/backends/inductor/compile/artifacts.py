"""A compiled region as an artifact of the store, and back, without tracing or compiling anything.

The payload is a zip: inductor's own pickle of the compiled graph (source of the wrapper, Triton's binaries), and on the
CPU the libraries that the wrapper loads. What Resolute knows of the region beside it is plain data.
"""

from __future__ import annotations

import copy
import dataclasses
import io
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
import torch.utils._pytree as pytree
import torch.utils._sympy.functions as torch_functions
from torch._inductor import config as inductor_config
from torch._inductor.codecache import PyCodeCache
from torch._inductor.cpu_vec_isa import pick_vec_isa, valid_vec_isa_list
from torch._inductor.output_code import CompiledFxGraph, CompiledFxGraphConstants
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._inductor.triton_bundler import TritonBundler

from ....store.artifact_store import Artifact, InvalidArtifactError
from ....store.private_files import atomic_write
from .lowering import Compiled, launch_by_address
from .shape_guards import ShapeGuards
from .variant import Variant

_GRAPH = "graph.pickle"
_LIBRARIES = "libraries/"

# Every function that may stand in an assumption: of sympy, and of torch's arithmetic of sizes.
_SYMPY = ("Add", "Mul", "Pow", "Eq", "Ne", "Lt", "Le", "Gt", "Ge", "And", "Or", "Not", "Rational")
_TORCH = (
    "CeilDiv", "CeilToInt", "CleanDiv", "FloorDiv", "FloorToInt", "IntTrueDiv", "Max", "Min", "Mod",
    "ModularIndexing", "PowByNatural", "PythonMod", "ToFloat", "Where",
)  # fmt: skip
_FUNCTIONS: dict[str, Any] = {
    **{name: getattr(sympy, name) for name in _SYMPY},
    **{name: getattr(torch_functions, name) for name in _TORCH if hasattr(torch_functions, name)},
}


def pack(key: str, label: str, variant: Variant) -> Artifact:
    """The artifact of a variant that was just compiled here. Raises InvalidArtifactError where it cannot be kept."""
    symbols = variant.assumptions.symbols
    about = {
        "symbols": {name: [symbol.name, symbol.assumptions0] for name, symbol in symbols.items()},
        "assumptions": [_encode(expression) for expression in variant.assumptions.expressions],
        "static": [list(sizes) for sizes in variant.static],
        "used_weights": list(variant.used_weights),
        "output": pytree.treespec_dumps(variant.output_spec),
        **measured(variant),
        "instructions": str(pick_vec_isa()) if variant.compiled.libraries else "",
    }
    return Artifact(key, label, about, _payload(variant.compiled))


def measured(variant: Variant) -> dict[str, Any]:
    """What is known of a variant only once it ran: the part of `Artifact.about` that another run may add to."""
    choices = {name: kernel.choice for name, kernel in variant.compiled.kernels.items()}
    return {"shown": sorted(variant.shown), "choices": {name: told for name, told in choices.items() if told}}


def unpack(artifact: Artifact) -> Variant:
    """Load it: ready to run. Raises InvalidArtifactError for what is not one of `pack`'s, and OutOfMemoryError.

    One at a time, and never beside a compile: what torch loaded meanwhile is taken for this one's.
    """
    about = artifact.about
    try:
        symbols = {name: sympy.Symbol(told, **given) for name, (told, given) in about["symbols"].items()}
        by_name = {symbol.name: symbol for symbol in symbols.values()}
        assumptions = ShapeGuards([_decode(each, by_name) for each in about["assumptions"]], symbols)
        static = tuple(tuple(sizes) for sizes in about["static"])
        spec = pytree.treespec_loads(about["output"])
        _expect_instructions(about["instructions"])
        compiled = _load(artifact.payload)
        for name, choice in about["choices"].items():
            if name in compiled.kernels:
                compiled.kernels[name].choose(choice)
        return Variant(compiled, assumptions, static, tuple(about["used_weights"]), spec, set(about["shown"]))
    except (InvalidArtifactError, torch.cuda.OutOfMemoryError):
        raise
    except Exception as error:  # torch's loaders raise whatever they meet
        raise InvalidArtifactError(f"{type(error).__name__} while it was loaded: {error}") from error


# --- the code --------------------------------------------------------------------------------------------------


def _payload(compiled: Compiled) -> bytes:
    if compiled.graph is None:
        raise InvalidArtifactError("it hands its inputs through, and there is no code to keep")
    graph = copy.copy(compiled.graph)
    graph.prepare_for_serialization()
    stored = _pickled(graph)
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as container:
        container.writestr(_GRAPH, stored)
        for name, content in compiled.libraries.items():
            container.writestr(_LIBRARIES + name, content)
    return stream.getvalue()


def _pickled(graph: CompiledFxGraph) -> bytes:
    """Raises InvalidArtifactError for a graph that cannot be kept."""
    try:
        try:
            return pickle.dumps(graph)
        except AssertionError:
            # What inductor found in its own cache has launchers by now, and refuses. Its binaries are there without.
            if graph._triton_bundle is None:
                raise
            graph._triton_bundle = dataclasses.replace(graph._triton_bundle, static_autotuners=[])
            return pickle.dumps(graph)
    except Exception as error:  # torch's classes refuse in ways of their own
        raise InvalidArtifactError(f"inductor's graph cannot be kept: {error}") from error


def _load(payload: bytes) -> Compiled:
    with zipfile.ZipFile(io.BytesIO(payload)) as container:
        for name in container.namelist():
            if name.startswith(_LIBRARIES):
                _place(PurePosixPath(name.removeprefix(_LIBRARIES)), container.read(name))
        graph: CompiledFxGraph = pickle.loads(container.read(_GRAPH))
    if graph._triton_bundle is not None:
        TritonBundler.read_and_emit(graph._triton_bundle)
    loaded = len(PyCodeCache.modules)
    graph.after_deserialization(CompiledFxGraphConstants())
    graph.post_compile([], CompiledFxGraphConstants(), graph.fx_kwargs)
    return Compiled(graph, launch_by_address(PyCodeCache.modules[loaded:]))


def _expect_instructions(wanted: str) -> None:
    """Spare inductor its search for the vector instructions that compiler and CPU have, 15 s in each process.

    That they do was found when the artifact was built, and is asked again where the CPU's own list says otherwise.
    """
    if not wanted or valid_vec_isa_list.cache_info().currsize:
        return
    with inductor_config.patch({"cpp.vec_isa_ok": True}):
        found = str(pick_vec_isa())
    if found != wanted:
        valid_vec_isa_list.cache_clear()


def _place(name: PurePosixPath, content: bytes) -> None:
    """Put a library where the wrapper looks for it, so that nothing is compiled."""
    if name.is_absolute() or ".." in name.parts:
        raise InvalidArtifactError(f"it names a file outside its folder: {name}")
    path = Path(cache_dir()) / name
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as stream:
        stream.write(content)


# --- assumptions as plain data ---------------------------------------------------------------------------------


def _encode(expression: sympy.Basic) -> Any:
    if expression in (sympy.true, sympy.false):
        return bool(expression)
    if isinstance(expression, sympy.Integer):
        return int(expression)
    if isinstance(expression, sympy.Symbol):
        return expression.name
    name = type(expression).__name__
    name = {"Equality": "Eq", "Unequality": "Ne", "StrictLessThan": "Lt", "LessThan": "Le"}.get(name, name)
    name = {"StrictGreaterThan": "Gt", "GreaterThan": "Ge"}.get(name, name)
    if isinstance(expression, sympy.Rational):
        return ["Rational", int(expression.p), int(expression.q)]
    if name not in _FUNCTIONS:
        raise InvalidArtifactError(f"an assumption about sizes holds {name}, which Resolute cannot write down")
    return [name, *map(_encode, expression.args)]


def _decode(data: Any, symbols: Mapping[str, sympy.Symbol]) -> sympy.Basic:
    if isinstance(data, bool):
        return sympy.true if data else sympy.false
    if isinstance(data, int):
        return sympy.Integer(data)
    if isinstance(data, str):
        return symbols[data]
    name, *arguments = data
    if name == "Rational":
        return sympy.Rational(*arguments)
    return _FUNCTIONS[name](*[_decode(argument, symbols) for argument in arguments])
