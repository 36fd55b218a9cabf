"""The core: one cache of compiled graphs, keyed by latent shape. It knows nothing of ComfyUI.

A folder imports only folders below it:

    calls/         one call: `GraphCache.run` looks it up, decides and counts; then it is put into words
    captures/      the captures of the process: made, bounded in bytes, refused with a reason
    backends/      how a call runs: `base` is the interface; inductor, CUDA graphs, OneFlow, eager
    attention/     attention as an operator that runs the fastest kernel for a shape, or the one that the user chose
    choices/       what measurements on this machine chose, kept on disk: kernels, and whether a call runs compiled
    store/         what survives a restart: compiled regions, bundles of them, the shapes that were used
    regions/       the blocks that are compiled: how an adapter describes one, their structure, their weights
    foreign/       the code around a model's classes: code of other packs, and code that changed
    torch_facts/   torch's flags that change results, its private names, its lack of memory

The files beside them import none of these. Start with `keys` (what a graph is keyed by), then `calls/cache`.
"""
