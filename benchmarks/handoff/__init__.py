"""The handoff core against its peers and against a memory copy: `python -m benchmarks.handoff`."""
