"""The blocks that Resolute compiles: one file per model family, listed in `registry`."""
