"""Attention as one operator that runs the fastest kernel for each shape (RESOLUTE_ATTENTION=measured, the default)."""
