"""The ComfyUI side of the pack: files of node classes, the HTTP routes, and in `adapters` what they call.

`extension` lists the nodes. A node class has its inputs, one call of an adapter, and its outputs. `onediff` has
OneDiff's nodes under their own ids.
"""
