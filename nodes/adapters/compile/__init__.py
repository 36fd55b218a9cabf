"""Compile nodes: each takes a MODEL, a VAE or a CONTROL_NET and returns one that runs through the cache."""
