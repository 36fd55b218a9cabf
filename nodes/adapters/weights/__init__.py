"""Where a module's weights are, the epoch that decides if a capture over them is valid, and how they are paged."""
