"""From a block to compiled code: trace, lower, and store as an artifact."""
