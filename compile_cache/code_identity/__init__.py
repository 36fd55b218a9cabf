"""The code that a model reaches: its content for keys, and changes that other packs make to it."""
