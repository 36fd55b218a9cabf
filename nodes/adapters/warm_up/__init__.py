"""Warm-up: `run` goes through a list of shapes, `predict` and `texts` do one of them; `scan` finds the shapes of a
workflow in its graph, by the `rules`, and `prompt` makes a prompt of them.
"""
