"""The shapes that an earlier process used: their regions are loaded ahead, and their readiness is reported."""
