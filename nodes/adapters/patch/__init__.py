"""The patched forward: the compile nodes install it, and each call goes through it to the cache."""
