"""What a compile node asks for: a MODEL, a VAE or a CONTROL_NET that runs through the cache."""
