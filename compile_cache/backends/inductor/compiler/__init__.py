"""The compile queue and its workers: compile many regions at once, beside the calls."""
