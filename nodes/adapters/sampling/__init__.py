"""Changes of a sampling run besides the model's forward: cond batching, overlapping steps, free memory."""
