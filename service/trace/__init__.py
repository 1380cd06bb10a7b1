"""Shows the timeline of a run as Chrome trace events. Every process records its part, and the run folder keeps all
parts."""
