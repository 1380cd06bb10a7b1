"""The rates of a machine, from a data sheet or measured, and the costs of a run's processes on it."""
