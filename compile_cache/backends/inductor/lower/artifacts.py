"""Convert a compiled region to an artifact of the store, and load it back without tracing or compiling.

The payload is a zip: inductor's pickle of the compiled graph (the wrapper's source and Triton's binaries), and on the
CPU the shared libraries that the wrapper loads. The rest of a `CompiledRegion` is plain data in `Artifact.about`.
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

from ....store.artifact_store import Artifact, InvalidArtifactError
from ....torch_compat.private_names import (
    CompiledFxGraph,
    CompiledFxGraphConstants,
    PyCodeCache,
    TritonBundler,
    VecISA,
    cache_dir,
    inductor_config,
    pick_vec_isa,
    pytree,
    size_functions,
    valid_vec_isa_list,
)
from . import operators
from .compiled_region import CompiledRegion, KernelByAddress, launch_by_address
from .lowering import code_of
from .private_cache import IN_THIS_PROCESS, inductor_lock, place, place_binaries, private_cache, remove_other_source
from .shape_guards import ConfirmedSizes, ShapeGuards

_GRAPH = "graph.pickle"
_LIBRARIES = "libraries/"

# Every function that a guard may contain: sympy's, and those of torch's size arithmetic.
_SYMPY = ("Add", "Mul", "Pow", "Eq", "Ne", "Lt", "Le", "Gt", "Ge", "And", "Or", "Not", "Rational")
_TORCH = (
    "CeilDiv", "CeilToInt", "CleanDiv", "FloorDiv", "FloorToInt", "IntTrueDiv", "Max", "Min", "Mod",
    "ModularIndexing", "PowByNatural", "PythonMod", "ToFloat", "Where",
)  # fmt: skip
_FUNCTIONS: dict[str, Any] = {
    **{name: getattr(sympy, name) for name in _SYMPY},
    **{name: getattr(size_functions, name) for name in _TORCH if hasattr(size_functions, name)},
}


def pack(key: str, label: str, compiled: CompiledRegion) -> Artifact:
    """The artifact of a region that this process compiled. Raises InvalidArtifactError if it cannot be stored."""
    symbols = compiled.guards.symbols
    about = {
        "symbols": {name: [symbol.name, symbol.assumptions0] for name, symbol in symbols.items()},
        "assumptions": [_encode(expression) for expression in compiled.guards.expressions],
        "branches": compiled.guards.branches,
        "static": [list(sizes) for sizes in compiled.static],
        "used_weights": list(compiled.used_weights),
        "quantized": [list(each) for each in compiled.quantized],
        "output": pytree.treespec_dumps(compiled.output_spec),
        **measured(compiled),
        "instructions": _instructions() if compiled.libraries and pick_vec_isa is not None else "",
    }
    return Artifact(key, label, about, _payload(compiled))


def measured(compiled: CompiledRegion) -> dict[str, Any]:
    """The part of `Artifact.about` known only after the region ran: confirmed sizes, and autotuned configurations."""
    choices = {name: kernel.choice for name, kernel in compiled.kernels.items()}
    return {"shown": compiled.confirmed.plain(), "choices": {name: each for name, each in choices.items() if each}}


def unpack(artifact: Artifact) -> CompiledRegion:
    """Load an artifact, ready to run; one compile or load at a time.

    Raises InvalidArtifactError if the bytes are malformed, so `pack` cannot have made them. Any other error (torch's
    loaders raise any class) is temporary or a fault of this process, and does not mean that the bytes are invalid.
    """
    about = artifact.about
    try:
        symbols = {name: sympy.Symbol(symbol, **given) for name, (symbol, given) in about["symbols"].items()}
        by_name = {symbol.name: symbol for symbol in symbols.values()}
        guards = ShapeGuards([_decode(each, by_name) for each in about["assumptions"]], symbols, about["branches"])
        static = tuple(tuple(sizes) for sizes in about["static"])
        used_weights, confirmed = tuple(about["used_weights"]), ConfirmedSizes.from_plain(about["shown"])
        quantized = tuple((str(layout), str(product)) for layout, product in about["quantized"])
        output, instructions, choices = about["output"], about["instructions"], dict(about["choices"])
        with zipfile.ZipFile(io.BytesIO(artifact.payload)) as container:
            stored, names = container.read(_GRAPH), container.namelist()
            libraries = {name: container.read(name) for name in names if name.startswith(_LIBRARIES)}
    except (ValueError, TypeError, LookupError, AttributeError, zipfile.BadZipFile) as error:
        raise InvalidArtifactError(f"{type(error).__name__} while it was read: {error}") from error
    spec = pytree.treespec_loads(output)
    with inductor_lock:
        _expect_instructions(instructions)
        graph, kernels = _load(stored, libraries)
    for name, choice in choices.items():
        if name in kernels:
            kernels[name].choose(choice)
    return CompiledRegion(
        code_of(graph), guards, static, used_weights, spec, kernels, graph, confirmed=confirmed, quantized=quantized
    )


# --- the code --------------------------------------------------------------------------------------------------


def _payload(compiled: CompiledRegion) -> bytes:
    if compiled.graph is None:
        raise InvalidArtifactError("it returns its inputs unchanged, so there is no code to store")
    graph = copy.copy(compiled.graph)
    graph.prepare_for_serialization()
    # Drop functions: they are called only at compile time (newer torch passes one for the decomposition table), and
    # pickle stores them by module name, which differs in a worker.
    graph.fx_kwargs = {name: value for name, value in graph.fx_kwargs.items() if not callable(value)}
    stored = _pickled(graph)
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as container:
        container.writestr(_GRAPH, stored)
        for name, content in compiled.libraries.items():
            container.writestr(_LIBRARIES + name, content)
    return stream.getvalue()


def _pickled(graph: CompiledFxGraph) -> bytes:
    """Raises InvalidArtifactError for a graph that cannot be pickled."""
    try:
        try:
            return pickle.dumps(graph)
        except Exception:  # pickling a launcher raises any class
            # A graph from inductor's own cache contains launchers, or functions that load them, which pickle rejects.
            # The bundle also contains the binaries, which suffice.
            if graph._triton_bundle is None:
                raise
            graph._triton_bundle = dataclasses.replace(graph._triton_bundle, static_autotuners=[])
            return pickle.dumps(graph)
    except Exception as error:  # torch's classes raise any class
        raise InvalidArtifactError(f"inductor's graph cannot be kept: {error}") from error


def _load(stored: bytes, libraries: Mapping[str, bytes]) -> tuple[CompiledFxGraph, dict[str, KernelByAddress]]:
    operators.register()
    with private_cache(), inductor_config.patch(IN_THIS_PROCESS):
        for name, content in libraries.items():
            _place(PurePosixPath(name.removeprefix(_LIBRARIES)), content)
        graph: CompiledFxGraph = pickle.loads(stored)
        remove_other_source(graph)
        if graph._triton_bundle is not None:
            TritonBundler.read_and_emit(graph._triton_bundle)
            place_binaries(graph._triton_bundle)
        loaded = len(PyCodeCache.modules)
        graph.after_deserialization(CompiledFxGraphConstants())
        graph.post_compile([], CompiledFxGraphConstants(), graph.fx_kwargs)
    return graph, launch_by_address(PyCodeCache.modules[loaded:])


def _instructions() -> str:
    """The compiler's flags for the vector instructions that inductor uses."""
    return str(pick_vec_isa().build_arch_flags())


def _expect_instructions(wanted: str) -> None:
    """Skip inductor's probe for vector instructions, which takes up to 15 s in each process: it builds libraries, and
    loads each in a process that imports torch.

    The probe ran when the artifact was built. It runs again if the CPU's own list leads to another result.
    """
    if not wanted or None in (pick_vec_isa, VecISA, valid_vec_isa_list) or valid_vec_isa_list.cache_info().currsize:
        return
    flags, check = set(wanted.split()), VecISA.check_build
    VecISA.check_build = lambda isa, code: flags.issuperset(isa.build_arch_flags().split())
    try:
        with inductor_config.patch({"cpp.vec_isa_ok": True}):
            found = _instructions()
    finally:
        VecISA.check_build = check
    if found != wanted:
        valid_vec_isa_list.cache_clear()


def _place(name: PurePosixPath, content: bytes) -> None:
    """Write a library to the path from which the wrapper loads it, so that inductor compiles nothing.

    Raises InvalidArtifactError for a name outside inductor's cache.
    """
    if name.is_absolute() or ".." in name.parts:
        raise InvalidArtifactError(f"it names a file outside its folder: {name}")
    place(Path(cache_dir()) / name, content)


# --- guards as plain data --------------------------------------------------------------------------------------


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
        raise InvalidArtifactError(f"a guard on sizes has {name} in it, which Resolute cannot store")
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
