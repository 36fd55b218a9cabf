"""The one cache of the process, and where it keeps compiled regions."""
