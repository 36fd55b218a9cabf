"""Compile nodes: a MODEL, a VAE or a CONTROL_NET in, and one that runs through the cache out."""
