"""The parts of `scripts/demo`: plan, pictures to read, prompts, report."""
