"""Environment variables that the driver gives to the other processes of its run."""

USER_FOLDER = "BATON_FOLDER"
"""The folder of the user's own modules: where the run was started."""

LOG_FOLDER = "BATON_LOG_FOLDER"
"""Inode number and path of the run's log folder."""

SAFE_PATH = "PYTHONSAFEPATH"
"""Python's own variable: if it is set, the current folder is not on the import path of `-c` and `-m`."""
