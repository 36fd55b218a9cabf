"""All code that knows ComfyUI's internals, one folder for each part of the work. The node classes call these.

A folder imports only folders below it, in this order: compile, warm_up, deepcache, forward, report, restart, sampling,
process, weights, blocks, scan, comfyui. `tests/unit/project/test_architecture.py` checks that.
"""
