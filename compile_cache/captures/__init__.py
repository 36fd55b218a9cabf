"""The captures of a process: made, kept within a budget, and refused with a reason."""
