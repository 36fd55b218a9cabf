"""Measurements on a GPU. Each writes raw JSON to `results/`, and measures its baseline in the same run."""
