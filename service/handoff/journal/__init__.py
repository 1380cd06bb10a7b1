"""The buffer's append-only log on disk."""
