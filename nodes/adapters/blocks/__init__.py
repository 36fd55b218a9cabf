"""The blocks that Resolute knows, one file per model family: what is a region, and which of its dimensions vary.

To add a family: write `hooks(module, run, bypass)` in a new file and add it to the adapter that serves its role.
"""
