"""Regions compiled by inductor with dynamic shapes, then a capture of the whole forward per signature on CUDA."""
