"""Pictures of the README, of the nodes' help and of the template browser."""
