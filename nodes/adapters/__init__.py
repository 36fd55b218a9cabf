"""All code that knows ComfyUI's internals, one folder for each part of the work. The node classes call these.

A folder imports only folders below it; `trust/` also reads `comfyui/transformer_options`:

    onediff/       translate OneDiff's nodes and settings into ours
    formats/       quantize a model's weights while it is loaded
    warm_up/       compile and capture a list of sizes ahead of time
    deepcache/     DeepCache: its schedule, its two passes, its state in a sampling run
    patch/         the patched forward of the compile nodes: install it, describe a call, run it through the cache
    report/        results for people: the report, the runs, the comparison of images, Measure against stock
    process/       process-wide state: the cache, a record of each module, settings; preload after a restart
    module_state/  whether a capture over a module's weights, settings and code is still valid
    dynamic_vram/  weights that ComfyUI pages and streams
    blocks/        which blocks of a model become regions: UNets, transformers, decoders, encoders
    comfyui/       ComfyUI itself: its versions, options, progress, queue and messages
    trust/         which packs' code a model runs, and which of it is trusted

`tests/unit/project/test_architecture.py` checks the order.
"""
