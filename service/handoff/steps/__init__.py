"""A step: its columns, its wire format, and limits on messages of steps."""
