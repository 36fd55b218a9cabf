"""The one cache: look a call up, decide its path, capture it, and keep the captures within a budget."""
