"""Every torch name that Resolute uses and that torch may move or rename unannounced, and the feature lost without it.

    from ..torch_compat.private_names import compile_fx, pytree

A name is looked up at its first use, because importing inductor takes seconds and not every process compiles. A name
that this torch lacks is None, or the substitute from the table, so an import from here never fails. A backend calls
`why_unavailable` in its `probe`, before any of its modules uses a name.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

logger = logging.getLogger(__name__)


class Feature(Enum):
    """The feature that does not work without a name."""

    CALLS = "no call is compiled or captured"
    COMPILING = "inductor compiles no region"
    KEEPING = "compiled regions are not kept, so every start compiles them again"
    WORKERS = "regions are compiled one after the other"
    GPU_WORKERS = "regions for a GPU are compiled one after the other"
    ADDRESSES = "with cudaMallocAsync, ComfyUI's default allocator, calls of compiled regions are not captured"
    HOST_VALUES = "forwards that make tensors on the host are not captured"
    RECOVERY = "after CUDA broke a capture, no other is made and memory is not freed until ComfyUI starts again"
    SPEED = "it takes somewhat longer"


@dataclass(frozen=True, slots=True)
class _Name:
    """A name in a module of torch.

    attribute: its name there, if ours differs; "" for the module itself. members: attributes that it must have.
    instead: makes its substitute.
    """

    name: str
    module: str
    feature: Feature
    attribute: str | None = None
    members: tuple[str, ...] = ()
    instead: Callable[[], Any] = lambda: None


class UnknownMode:
    """Placeholder for an active mode when torch cannot list them."""


class _NoMode:
    """Not the class of any mode."""


def _some_hook() -> dict[int, None]:
    return {0: None}


def _triton_key() -> None:
    importlib.import_module("triton.compiler.compiler").triton_key()  # where it was before torch 2.9


_MODE_STACK = "_get_current_{}_mode_stack"
_TREES = ("tree_flatten", "tree_unflatten", "tree_leaves", "tree_map", "treespec_dumps", "treespec_loads", "TreeSpec")
_GRAPH_MEMBERS = (
    "prepare_for_serialization", "after_deserialization", "post_compile", "_triton_bundle", "cache_key", "source_code",
    "fx_kwargs",
)  # fmt: skip

_TABLE = (
    _Name("pytree", "torch.utils._pytree", Feature.CALLS, "", members=_TREES),
    # Contexts that torch computes under, see flags.py. If modes cannot be listed, assume that one is active.
    _Name("DeviceContext", "torch.utils._device", Feature.CALLS, instead=lambda: _NoMode),
    _Name(
        "function_mode_stack", "torch.overrides", Feature.CALLS, _MODE_STACK.format("function"),
        instead=lambda: lambda: [UnknownMode()],
    ),
    _Name(
        "dispatch_mode_stack", "torch.utils._python_dispatch", Feature.CALLS, _MODE_STACK.format("dispatch"),
        instead=lambda: lambda: [UnknownMode()],
    ),
    _Name("TorchDispatchMode", "torch.utils._python_dispatch", Feature.HOST_VALUES, instead=lambda: _NoMode),
    # If global hooks cannot be read, assume that there is one.
    *(
        _Name(f"global_{kind}", "torch.nn.modules.module", Feature.CALLS, f"_global_{kind}", instead=_some_hook)
        for kind in ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")
    ),
    _Name("mkldnn_enabled", "torch._C", Feature.CALLS, "_get_mkldnn_enabled", instead=lambda: lambda: None),
    _Name(
        "end_allocate_to_pool", "torch._C", Feature.RECOVERY, "_cuda_endAllocateToPool",
        instead=lambda: lambda device, pool: None,
    ),
    _Name("release_pool", "torch._C", Feature.RECOVERY, "_cuda_releasePool", instead=lambda: lambda device, pool: None),
    _Name(
        "register_fake_devices", "torch._C", Feature.GPU_WORKERS, "_ensureCUDADeviceGuardSet",
        instead=lambda: lambda: None,
    ),
    _Name("contexts", "torch.utils._contextlib", Feature.SPEED, ""),
    _Name("driver_version", "torch._C", Feature.SPEED, "_cuda_getDriverVersion", instead=lambda: lambda: 0),
    _Name("is_in_use", "torch._C", Feature.SPEED, "_cuda_hasPrimaryContext", instead=lambda: lambda device: True),
    _Name("spin", "torch.cuda", Feature.SPEED, "_sleep", instead=lambda: lambda cycles: None),
    _Name("foreach_copy", "torch", Feature.CALLS, "_foreach_copy_"),
    # Dynamo is imported for its locks and counters. It traces nothing.
    _Name("dynamo", "torch._dynamo", Feature.COMPILING, ""),
    _Name("make_fx", "torch.fx.experimental.proxy_tensor", Feature.COMPILING),
    _Name("PythonKeyTracer", "torch.fx.experimental.proxy_tensor", Feature.SPEED,
          members=("trace", "create_args_for_root", "create_arg", "create_node")),
    _Name("symbolic_shape_config", "torch.fx.experimental._config", Feature.COMPILING, "", ("backed_size_oblivious",)),
    _Name("ShapeEnv", "torch.fx.experimental.symbolic_shapes", Feature.COMPILING,
          members=("create_symbol", "create_symintnode", "constrain_symbol_range")),
    _Name("DimDynamic", "torch.fx.experimental.symbolic_shapes", Feature.COMPILING),
    _Name("FakeTensorMode", "torch._subclasses.fake_tensor", Feature.COMPILING, members=("from_tensor",)),
    _Name("FakeTensor", "torch._subclasses.fake_tensor", Feature.COMPILING),
    _Name("ConstantSource", "torch._dynamo.source", Feature.COMPILING),
    _Name("TracingContext", "torch._guards", Feature.COMPILING),
    _Name("tracing", "torch._guards", Feature.COMPILING),
    _Name("OpOverload", "torch._ops", Feature.COMPILING),
    _Name("inductor_config", "torch._inductor.config", Feature.COMPILING, "", ("patch",)),
    _Name("functorch_config", "torch._functorch.config", Feature.COMPILING, "", ("patch", "enable_autograd_cache")),
    _Name("compile_fx", "torch._inductor.compile_fx", Feature.COMPILING),
    _Name("compile_fx_inner", "torch._inductor.compile_fx", Feature.COMPILING),
    _Name("CompiledFxGraph", "torch._inductor.output_code", Feature.COMPILING, members=("current_callable",)),
    _Name("PyCodeCache", "torch._inductor.codecache", Feature.COMPILING, members=("modules",)),
    _Name("decomposition_table", "torch._inductor.decomposition", Feature.COMPILING, "select_decomp_table"),
    _Name("computation_dtype", "torch._prims_common", Feature.COMPILING, "get_computation_dtype"),
    _Name("cache_dir", "torch._inductor.runtime.cache_dir_utils", Feature.COMPILING),
    _Name("default_cache_dir", "torch._inductor.runtime.cache_dir_utils", Feature.COMPILING),
    _Name("temporary_cache_dir", "torch._inductor.runtime.cache_dir_utils", Feature.KEEPING),
    _Name("triton_cache_dir", "torch._inductor.runtime.cache_dir_utils", Feature.KEEPING),
    _Name("get_path", "torch._inductor.codecache", Feature.KEEPING),
    _Name("StoredGraph", "torch._inductor.output_code", Feature.KEEPING, "CompiledFxGraph", _GRAPH_MEMBERS),
    _Name("CompiledFxGraphConstants", "torch._inductor.output_code", Feature.KEEPING),
    _Name("TritonBundler", "torch._inductor.triton_bundler", Feature.KEEPING,
          members=("read_and_emit", "_REPLACE_BYTES")),
    _Name("TritonBundle", "torch._inductor.triton_bundler", Feature.KEEPING, members=("kernel_artifacts",)),
    _Name("size_functions", "torch.utils._sympy.functions", Feature.KEEPING, ""),
    _Name("portable_config", "torch._inductor.config", Feature.KEEPING, "save_config_portable"),
    # torch holds it while it compiles under changed settings. Without it no digest of the settings can be trusted.
    _Name("compile_lock", "torch._dynamo.convert_frame", Feature.KEEPING, instead=threading.RLock),
    _Name("load_config", "torch._inductor.config", Feature.WORKERS),
    _Name("GraphPickler", "torch.fx._graph_pickler", Feature.WORKERS, members=("dumps", "loads")),
    # Names that a worker without a GPU driver substitutes.
    _Name("ConvBackend", "torch._C", Feature.GPU_WORKERS, "_ConvBackend",
          ("Slow2d", "SlowDilated2d", "SlowDilated3d", "Cudnn")),
    _Name("torch_c", "torch._C", Feature.GPU_WORKERS, "", ("_select_conv_backend",)),
    _Name("CudaInterface", "torch._dynamo.device_interface", Feature.GPU_WORKERS, members=("get_device_properties",)),
    _Name("fake_tensor", "torch._subclasses.fake_tensor", Feature.GPU_WORKERS, "", ("init_gpu_context",)),
    _Name("UniformValueConstantFolder", "torch._inductor.fx_passes.joint_graph", Feature.GPU_WORKERS,
          members=("_deduce_value",)),
    _Name("triton_helpers", "torch._inductor.runtime.triton_helpers", Feature.GPU_WORKERS, "", ("set_driver_to_gpu",)),
    _Name("CompilesApart", "torch._inductor.runtime.triton_heuristics", Feature.GPU_WORKERS, "CachingAutotuner",
          ("_make_launchers", "_precompile_worker")),
    _Name("GPUTarget", "triton.backends.compiler", Feature.GPU_WORKERS),
    _Name("triton_driver", "triton.runtime.driver", Feature.GPU_WORKERS, "driver", ("set_active",)),
    _Name("PickleOptions", "torch.fx._graph_pickler", Feature.SPEED, "Options"),  # without, only torch's own operators
    _Name("CachingAutotuner", "torch._inductor.runtime.triton_heuristics", Feature.ADDRESSES, members=("run",)),
    _Name("CudaLauncher", "triton.backends.nvidia.driver", Feature.ADDRESSES, members=("__call__",)),
    _Name("InductorChoices", "torch._inductor.choices", Feature.SPEED, members=("should_use_persistent_reduction",)),
    _Name("fast_fake_results", "torch._subclasses.fake_impls", Feature.SPEED, "get_fast_op_impls"),
    _Name("addmm_activation", "torch", Feature.SPEED, "_addmm_activation"),
    _Name("inductor_graphs", "torch._inductor.virtualized", Feature.SPEED, "V", ("set_choices_handler",)),
    _Name("conv_formats", "torch._C", Feature.SPEED, "", ("_conv_determine_backend_memory_format",)),
    _Name("counters", "torch._dynamo.utils", Feature.SPEED),  # without them, each region is compared at sizes of 1
    _Name("pick_vec_isa", "torch._inductor.cpu_vec_isa", Feature.SPEED),
    _Name("VecISA", "torch._inductor.cpu_vec_isa", Feature.SPEED, members=("check_build", "build_arch_flags")),
    _Name("valid_vec_isa_list", "torch._inductor.cpu_vec_isa", Feature.SPEED, members=("cache_info", "cache_clear")),
    _Name("torch_key", "torch._inductor.codecache", Feature.SPEED),
    _Name("init_backend_registration", "torch._inductor.codegen.common", Feature.SPEED),
    _Name("triton_key", "torch._inductor.runtime.triton_compat", Feature.SPEED, instead=lambda: _triton_key),
    _Name("triton_code_generator", "triton.compiler.code_generator", Feature.SPEED, ""),
)  # fmt: skip
NAMES = {each.name: each for each in _TABLE}

# Modules of functions that torch.compile makes.
COMPILER_MODULES = ("torch._dynamo", "torch._inductor")
# Loggers of torch's symbolic arithmetic, which write thousands of harmless lines for odd sizes.
NOISY_LOGGERS = ("torch.utils._sympy.interp", "torch.fx.experimental.symbolic_shapes")

_PARTS = (
    "torch._dynamo", "networkx", "torch._functorch.aot_autograd", "torch._inductor.decomposition",
    "torch._inductor.lowering", "torch._inductor.codegen.subgraph", "torch._inductor.kernel",
    "torch._inductor.select_algorithm", "torch._inductor.codecache", "torch._inductor.compile_fx",
)  # fmt: skip

_lock = threading.RLock()  # two threads that import inductor at once see it half initialised
# Python's switch interval while a thread imports or traces. With the default of 5 ms, a prompt could wait that long to
# get the GIL back each time that it releases it.
_SWITCH_SECONDS = 2e-5
_switch_lock = threading.Lock()
_yielding_threads, _usual_seconds = 0, 0.0  # the number of threads inside `yielding_gil`


def __getattr__(name: str) -> Any:
    if name not in NAMES:
        raise AttributeError(f"{__name__} has no {name}: add it to its table")
    value, why_not = _look_up(NAMES[name])
    return NAMES[name].instead() if why_not else value


@functools.cache
def why_unavailable(*features: Feature) -> str:
    """Name the first thing that this torch lacks for these features, without a full stop; empty if it lacks nothing.

    Looks up all their names, which imports inductor for all but CALLS.
    """
    lacking = [each for each in _TABLE if each.feature in features and _look_up(each)[1]]
    if not lacking:
        return ""
    return f"torch {torch.__version__} lacks {_look_up(lacking[0])[1]}: {lacking[0].feature.value}"


def _look_up(name: _Name) -> tuple[Any, str]:
    """Return a name's value and an empty text, or None and the path that is missing."""
    with _lock:
        return _cached_look_up(name)


@functools.cache
def _cached_look_up(name: _Name) -> tuple[Any, str]:
    attribute = name.name if name.attribute is None else name.attribute
    path = f"{name.module}.{attribute}".rstrip(".")
    try:
        module = _imported(name.module)
        value = getattr(module, attribute) if attribute else module
    except Exception as error:  # a module that moved, or that fails when it is imported
        logger.debug("Resolute: %s was not found", path, exc_info=error)
        return None, path
    missing = [each for each in name.members if not hasattr(value, each) and each not in _annotated(value)]
    return (None, f"{path}.{missing[0]}") if missing else (value, "")


def _imported(module: str) -> Any:
    """Import a module under the lock."""
    with yielding_gil():
        return importlib.import_module(module)


def import_inductor(yield_point: Callable[[], None]) -> None:
    """Import inductor in parts of a few tenths of a second. yield_point: called after each part; it may block."""
    for module in _PARTS:
        with contextlib.suppress(Exception):  # a module that moved: `why_unavailable` reports it
            _imported(module)
        yield_point()


@contextlib.contextmanager
def yielding_gil() -> Iterator[None]:
    """Inside, Python switches threads often, so that other threads soon get the GIL."""
    global _yielding_threads, _usual_seconds
    with _switch_lock:
        if not _yielding_threads:
            _usual_seconds = sys.getswitchinterval()
            sys.setswitchinterval(_SWITCH_SECONDS)
        _yielding_threads += 1
    try:
        yield
    finally:
        with _switch_lock:
            _yielding_threads -= 1
            if not _yielding_threads:
                sys.setswitchinterval(_usual_seconds)


def _annotated(value: Any) -> dict[str, Any]:
    found: dict[str, Any] = getattr(value, "__annotations__", {})
    return found
