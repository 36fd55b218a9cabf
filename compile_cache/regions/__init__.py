"""What a region is: the block that is compiled, its structure, and code of other packs inside it."""
