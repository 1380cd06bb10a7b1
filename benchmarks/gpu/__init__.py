"""What only a GPU can show, in one command: `make gpu`, or `python -m benchmarks.gpu`."""
