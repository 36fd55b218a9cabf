"""OneDiff's nodes (onediff_comfy_nodes) under their own ids, as thin translations to ours.

With them, a workflow that was made with OneDiff opens and runs without OneDiff. Each node is marked deprecated, and its
title names its replacement. docs/onediff.md has the table. Inputs keep OneDiff's names and order, because workflows
store them; most are optional, because OneDiff's versions had different inputs. An input whose values differed between
versions is a plain text here, since ComfyUI refuses a choice that is not in the list.
"""
