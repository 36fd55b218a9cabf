"""What a command needs before it can run: ComfyUI checkouts and virtual environments. Standard library only."""
