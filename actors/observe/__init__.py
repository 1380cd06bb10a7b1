"""The metrics hub, and what the other actors send to it."""
