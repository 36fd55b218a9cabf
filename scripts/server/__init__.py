"""A ComfyUI process, and a client of its API."""
