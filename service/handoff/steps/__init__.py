"""A step: its columns, its form on the wire, and the rules that it has to pass."""
