"""The one cache of the process, its record of each module, a compile node's request, and the user's settings."""
