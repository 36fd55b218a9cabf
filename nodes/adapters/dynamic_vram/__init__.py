"""Weights that ComfyUI pages and streams (DynamicVRAM): pin, fill and order their pages around a call."""
