"""Capture a forward as a CUDA graph, and give its memory back."""
