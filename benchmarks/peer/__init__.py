"""The quick start end to end, in Baton and in TRL's synchronous trainer: `python -m benchmarks.peer`."""
