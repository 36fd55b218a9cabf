"""Warm-up: run a model and a decoder once at each size in a list, so that later prompts find everything compiled.

Two callers start one: the Warm Up node, and `POST /resolute/warm-up` (which `scripts/warm-up` uses).
1. The route calls `request.parse_request`. It turns the request into a prompt that contains Warm Up nodes.
2. For a workflow, `scan` finds the sizes first. `prompt.warm_up_prompt` then builds those nodes, and keeps only the
   loaders and conditioning that they need.
3. Each Warm Up node calls `run.warm_up` with its list. An item whose captures still exist is skipped.
4. For every other item, `predict.predict` runs one step of the model through ComfyUI's sampling code, and
   `predict.decode` decodes one latent of noise. The cache compiles and captures what these calls need.
5. `dummy_conditioning` stands in for positive and negative where none is connected. Only its shape matters.
"""
