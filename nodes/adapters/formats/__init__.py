"""Load a model's weights in one of ComfyUI's own formats, chosen for this device and checked weight by weight."""
