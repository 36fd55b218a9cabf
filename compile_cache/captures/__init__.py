"""The captures of a process: kept within a budget, made, and refused with a reason."""
