"""The core: one cache of compiled graphs, keyed by latent shape. It knows nothing of ComfyUI.

A folder imports only folders below it:

    calls/         one call: `GraphCache.run` looks it up, decides its path and counts it; reports put it into words
    captures/      the captures of the process: made, bounded in bytes, refused with a reason
    backends/      execution of a call: `base` is the interface; inductor, CUDA graphs, OneFlow, eager
    attention/     attention as an operator that runs the fastest kernel for a shape, or the one that the user chose
    choices/       choices measured on this machine and kept on disk: kernels, and compiled or eager calls
    store/         data that survives a restart: compiled regions, bundles of them, the shapes that were used
    regions/       the blocks that are compiled: how an adapter describes one, their structure, their weights
    foreign/       the code around a model's classes: code of other packs, and code that changed
    torch_facts/   facts about torch: flags that change results, private names, out-of-memory errors

The files beside these folders import none of them. Start with `keys` (the keys of graphs), then `calls/cache`.
"""
