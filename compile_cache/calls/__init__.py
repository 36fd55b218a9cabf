"""From a call to its answer: look it up, decide what happens to it, count it."""
