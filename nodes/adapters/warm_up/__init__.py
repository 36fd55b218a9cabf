"""Warm-up. `run` goes through a list of shapes; `predict` and `texts` do one of them. `request` and `prompt` make such
a list of what a workflow reaches.
"""
