"""The buffer's Ray actor."""
