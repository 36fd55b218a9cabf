"""Scanner: find the sizes and batches that a workflow will sample and decode, without running it.

1. `workflow.scan` gets a workflow in API form and checks it (`parse_workflow`).
2. `graph.topological_order` puts the nodes in order, each after the nodes that it depends on.
3. For each node, `workflow.evaluate` calls the rule of its class (`rules.RULES`). The rule reads the node's inputs and
   returns its outputs, for example `Latent(width, height, batch)`, with the same rounding as the real node.
4. The scanner does not guess what a class without a rule does. Its outputs are a `NotKnownError` that names the node,
   and so are the outputs of all nodes that need them.
5. `graph.nodes_that_run` drops the nodes that no output needs. For each sampler and decoder left, `scan` returns a
   `Sampling` or `Decoding` with its size, or a sentence that says why the size is not known.

To teach it a node, add a line to a table in `rules` and a function to `latents`, `images`, `numbers` or `conditioning`.
"""
