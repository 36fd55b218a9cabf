"""What a sampling run does around the calls: batches of conditions, overlapping steps, free memory."""
