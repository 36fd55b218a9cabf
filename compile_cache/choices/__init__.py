"""Choices that measurements on this machine made, kept on disk."""
