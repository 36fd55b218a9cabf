"""What the browser tests need of this machine."""
