"""Capture a forward as a CUDA graph, and free the graph's memory."""
