"""Determines whose code a model runs, and which code of other packs is trusted."""
