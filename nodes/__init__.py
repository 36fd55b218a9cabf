"""The ComfyUI side of the pack: the node classes, the HTTP routes and, in `adapters`, the code that they call.

`extension` lists the nodes. A node class declares its inputs and outputs and makes one call of an adapter. `onediff`
has OneDiff's nodes under their own ids.
"""
