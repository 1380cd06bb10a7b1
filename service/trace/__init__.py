"""The timeline of a run: every process records its part, the run folder keeps it, and Chrome trace events show it."""
