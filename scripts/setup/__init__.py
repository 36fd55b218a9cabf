"""Set-up before a command can run: ComfyUI checkouts and virtual environments. Standard library only."""
