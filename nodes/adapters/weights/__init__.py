"""The places of a module's weights, and the epoch that says if a capture over them is still right."""
