"""OneDiff's settings in our terms: what a booster of its nodes means for a model, a VAE or a ControlNet."""
