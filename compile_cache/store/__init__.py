"""Data that survives a restart: compiled regions, bundles of them, and the shapes that were used."""
