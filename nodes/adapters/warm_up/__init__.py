"""Warm-up: run a workflow, or a list of sizes, once before they are used, so that later prompts find them compiled.

A warm-up starts in one of two ways.

`POST /resolute/warm-up` (which `scripts/warm-up` and the panel use) gets a workflow, and a warm-up of it is a prompt:
1. `request.parse_request` checks the request. `prompt.warm_up_prompt` changes the workflow: it saves nothing, and has
   step nodes before its samplers, encoders and decoders. ComfyUI runs it like any prompt.
2. `one_step.begin_step` gives each model a sampler of few steps. `one_step.report` lists the runs.

A Warm Up node has a list of sizes:
1. `run.warm_up` gets the list. An item whose captures still exist is skipped.
2. For every other item, `predict.predict` samples with the same few steps, and `predict.decode` decodes one latent of
   noise, both through core's own code. The cache compiles and captures what these calls need.
3. `predict.dummy_conditioning` stands in for positive and negative where none is connected. Only its shape matters.
"""
