"""The repeated blocks of transformers, recognised without knowing the family."""
