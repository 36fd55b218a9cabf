"""What measurements on this machine decided, kept on disk."""
