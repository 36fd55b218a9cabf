"""The pure core: one cache of compiled graphs, keyed by latent shape. It knows nothing of ComfyUI.

Read in this order: `keys` (what a graph is keyed by), `dispatcher` (what happens to a call), `cache` (the facade),
`backends` (how a graph is made).
"""
