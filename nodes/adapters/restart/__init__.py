"""The shapes that earlier processes used: their regions are loaded ahead, and their readiness is reported."""
