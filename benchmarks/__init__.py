"""Measurements on a GPU. Each writes raw JSON to `results/`, with its contender measured in the same run."""
