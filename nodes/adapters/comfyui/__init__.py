"""ComfyUI itself: its version, its queue, its progress text."""
