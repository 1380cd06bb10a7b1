"""Stores a run's checkpoints and final weights in an object store (`run.store`), and restores runs from there.

step_<n>/manifest.json         the run, and the upload that is whole; written last, and never over another one
step_<n>/<upload>/<path>       a file of the checkpoint, by its path in the run's folder
final/, summary.json, ...      how the run ended; `summary.json` last
"""
