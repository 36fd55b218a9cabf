"""Formats of weights that a model is loaded in: ComfyUI's own, chosen for this device and checked weight by weight."""
