"""The shapes that earlier processes used: preload their regions, and report which shapes are ready."""
