"""Access to ComfyUI itself: version differences, options, progress, queue and messages."""
