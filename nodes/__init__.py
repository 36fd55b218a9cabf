"""The ComfyUI side of the pack: node classes in this folder, and in `adapters` the code that they call."""
