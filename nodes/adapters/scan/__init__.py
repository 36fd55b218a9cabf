"""What a workflow will sample and decode, told from its graph. `workflow` is the way in; `rules` is the table of what
each kind of node does to sizes, batches and texts, and the place to teach it another one.
"""
