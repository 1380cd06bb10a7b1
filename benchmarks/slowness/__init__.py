"""Real runs in which one part becomes slow: `python -m benchmarks.slowness`."""
