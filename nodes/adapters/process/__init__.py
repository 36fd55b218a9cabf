"""The one cache of the process, its record of each module, the user settings, and the shapes used before a restart."""
