"""Shared code of the commands and the server tests: environment, ComfyUI, models, server.

These modules import only the standard library at the top, because they run before the
environment exists. ``models`` imports torch inside functions.
"""
