"""Where a module's weights are, the epoch that says if a capture over them is right, and how they are paged."""
