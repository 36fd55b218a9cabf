"""Attention as one operator: the fastest kernel for each shape (`chooser`), or the user's choice (`chosen`)."""
