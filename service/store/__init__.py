"""Stores a run's checkpoints and final weights in an object store (`run.store`), and restores runs from there.

run.json                              which run the store holds, and which process writes into it
reached.json                          the newest step of the run, written from time to time
checkpoints/step_<n>/store.json       the manifest of a checkpoint, written last: without it there is no checkpoint
files/<path>/<checksum>               a file, by its path in the run's folder; several checkpoints may need the same one
final/, summary.json, ...             how the run ended; `summary.json` last
"""
