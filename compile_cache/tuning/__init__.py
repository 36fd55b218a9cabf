"""Choices that are measured on this machine and kept on disk."""
