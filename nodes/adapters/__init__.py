"""All code that knows ComfyUI's internals, one folder for each part of the work. The node classes call these.

A folder imports only folders below it:

    onediff/    translate OneDiff's nodes and settings into ours
    compile/    the compile nodes: put a compiled forward into a MODEL, a VAE or a CONTROL_NET
    warm_up/    compile and capture a list of sizes ahead of time
    deepcache/  DeepCache: its schedule, its two passes, its state in a sampling run
    forward/    the forward that ComfyUI calls: describe a call, run it through the cache, log the run
    report/     results for people: the report, the runs, the comparison of images, Measure against stock
    restart/    after a restart: preload compiled regions, and report which shapes are ready
    sampling/   other changes to a sampling run: batches of conds, free memory
    process/    process-wide state: the cache, a record of each module, the user's settings
    weights/    where a module's weights are, when a capture over them is valid, and how they are paged in
    blocks/     which blocks of a model become regions: UNets, transformers, decoders, encoders
    comfyui/    ComfyUI itself: its versions, options, DynamicVRAM, progress, queue and messages
    foreign/    which packs' code a model runs, and which of it is trusted

`tests/unit/project/test_architecture.py` checks the order.
"""
