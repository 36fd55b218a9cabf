"""From a block to compiled code: trace, lower, and keep it as an artifact."""
