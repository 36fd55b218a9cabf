"""One call: the patched forward describes it and sends it through the cache."""
