"""Attention as one operator: the fastest kernel of each shape (`chooser`), or one that the user chose (`chosen`)."""
