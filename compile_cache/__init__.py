"""The core: one cache of compiled graphs, keyed by the signature of a call. It knows nothing of ComfyUI.

A folder imports only folders below it:

    cache/          `GraphCache.run` answers a call: look up, decide, count; captures, bounded in bytes
    backends/       execution of a call: `base` is the interface; inductor, CUDA graphs, OneFlow, eager
    attention/      attention as an operator that runs the fastest kernel for a shape, or the one that the user chose
    tuning/         choices measured on this machine and kept on disk: kernels, and compiled or eager calls
    telemetry/      counters, runs, estimates, and reasons in words
    store/          data that survives a restart: compiled regions, bundles of them, the shapes that were used
    modules/        the modules that are compiled: how an adapter describes one, their structure, their weights
    code_identity/  the code that a model reaches: its content for keys, and changes by other packs
    torch_compat/   facts about torch: flags that change results, private names, out-of-memory errors

The files beside these folders import none of them. Start with `keys` (the keys of graphs), then `cache/graph_cache`.
"""

# The folders and files that `nodes/` may import; a name without a file means the whole folder. The files beside the
# folders may be imported too. `tests/unit/project/test_architecture.py` checks it.
FOR_ADAPTERS = (
    "attention",
    "backends.base",
    "backends.cuda_graphs.memory",
    "backends.cudagraph",
    "backends.eager",
    "backends.inductor.regions.prologue_cache",
    "backends.inductor.regions.split_sites",
    "backends.registry",
    "cache.captures",
    "cache.graph_cache",
    "code_identity",
    "modules",
    "store.shape_history",
    "telemetry",
    "torch_compat",
    "tuning",
)
