"""Names of the environment variables that the driver sets for the other processes of its run."""

USER_FOLDER = "BATON_FOLDER"
"""The folder with the user's own modules, in which the run was started."""

LOG_FOLDER = "BATON_LOG_FOLDER"
"""Inode number and path of the folder with the run's logs."""

SAFE_PATH = "PYTHONSAFEPATH"
"""Python's own variable: if set, `python -c` and `python -m` do not put the current folder on the import path."""
