"""ComfyUI itself: what differs between its versions, and its options, DynamicVRAM, progress, queue and messages."""
