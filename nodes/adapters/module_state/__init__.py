"""The state of a module: its weights, settings and code. It decides if a capture over them is still valid."""
