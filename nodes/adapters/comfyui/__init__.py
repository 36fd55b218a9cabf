"""ComfyUI itself: differences between its versions, its queue, its progress text."""
