"""What the commands and the server tests share: environment, ComfyUI, models, server.

Only the standard library is imported at the top of these modules, because they run
before the environment exists. ``models`` imports torch in functions only.
"""
