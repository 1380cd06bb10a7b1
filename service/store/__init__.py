"""Stores a run's checkpoints and final weights in an object store (`run.store`), and restores runs from there.

step_<n>/manifest.json         ids of the run and of the complete upload; written last, never overwritten
step_<n>/<upload>/<path>       a file of the checkpoint, by its path in the run's folder
final/, summary.json, ...      the results of the run; `summary.json` is written last
"""
