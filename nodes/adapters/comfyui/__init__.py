"""Access to ComfyUI itself: version differences, options, DynamicVRAM, progress, queue and messages."""
