"""Compile many regions at once, in processes of their own."""
