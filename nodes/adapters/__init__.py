"""Between ComfyUI and the cache: one file for each thing that ComfyUI does its own way."""
