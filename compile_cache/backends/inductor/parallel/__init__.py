"""Compile many regions at once, in worker processes."""
