"""The metrics hub, and the reports that the other actors send to it."""
