"""The timeline of a run: recorded by every process, kept in the run folder, written as Chrome trace events."""
