"""Answer a call: look it up, decide its path, run and count it."""
