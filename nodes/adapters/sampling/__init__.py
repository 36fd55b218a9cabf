"""Changes of a sampling run besides the model's forward: batches of conds, free memory."""
