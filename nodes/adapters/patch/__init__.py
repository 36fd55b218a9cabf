"""The patched forward: the compile nodes install it, and each call goes through it to the cache.

`compiled_forward`: the forward that ComfyUI calls. `patch_install` puts it into a model; `forward_patch` is its base.
`call_description`: the arguments of a call, and which of them forbid a capture. `module_runner`: one call.
"""
