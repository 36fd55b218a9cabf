"""The regions of one module, and the table of compiled regions that all modules share."""
