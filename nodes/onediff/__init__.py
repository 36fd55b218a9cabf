"""OneDiff's nodes (onediff_comfy_nodes) under their own ids, as thin translations to ours.

They let a workflow that was made with OneDiff open and run where OneDiff is not installed. Each is marked deprecated,
and its title says what it became. docs/onediff.md has the table. Inputs keep OneDiff's names and order, because
workflows store them; most are optional, because its versions had different ones. An input whose values differed between
versions is a plain text here, since ComfyUI refuses a choice that is not in the list.
"""
