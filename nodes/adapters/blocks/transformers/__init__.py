"""The repeated blocks of transformers, found without knowing the family."""
