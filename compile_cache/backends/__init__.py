"""How graphs are made: one file or folder per backend, behind the interface of `base`."""
