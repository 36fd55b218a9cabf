"""Translate OneDiff's boosters into our settings for a model, a VAE or a ControlNet."""
