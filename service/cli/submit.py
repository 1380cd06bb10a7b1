"""`baton submit`."""

from __future__ import annotations

import argparse

ABOUT = "Submit `baton run` as a Ray job and show its output; while the cluster is starting, try again."

EXAMPLES = """\
The job works in a temporary copy of the current folder. Configuration files must lie in that folder. Give run.dir as an
absolute path; a relative one starts at the home folder of the node on which the job runs. The cluster's token is read
from ~/.ray/auth_token or RAY_AUTH_TOKEN. `ray job stop JOB` ends the run in order and writes its final weights.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command, other than those of its configuration."""
    parser.add_argument("--address", metavar="URL", help="the cluster's dashboard (default: the one that Ray finds)")
    parser.add_argument("--no-follow", action="store_true", help="return at once instead of showing the output")
