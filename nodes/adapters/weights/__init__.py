"""Where the weights of a module are, and whether a capture over them is still right."""
