"""ComfyUI's front end in a headless Chromium."""
