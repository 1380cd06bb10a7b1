"""Stores a run's checkpoints and final weights in an object store (`run.store`), and restores runs from there.

step_<n>/manifest.json         the files of a checkpoint; written last, and never over another one
step_<n>/<writer>/<path>       a file that process uploaded, by its path in the run's folder
final/, summary.json, ...      how the run ended; `summary.json` last
"""
