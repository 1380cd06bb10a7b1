"""The Ray actor of the buffer."""
