"""What outlives a process: compiled regions, bundles of them, and the shapes that were used."""
