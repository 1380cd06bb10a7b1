"""What a machine does in a second: from a data sheet, or measured here, and what the processes of a run cost it."""
