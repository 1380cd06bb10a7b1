"""`baton agent-try`: serves the endpoint for agents without a run, to show which of their tokens would be trained."""

from __future__ import annotations

import argparse
from pathlib import Path

ABOUT = """\
Serve the endpoint for agents alone, without a run. Each call of an agent is printed with its role, and at the end the
number of tokens that would be trained. Ctrl-C ends the trial.
"""
EXAMPLES = """\
examples:
  baton agent-try models/Qwen3-0.6B                       # vLLM on this machine
  baton agent-try --scripted replies.txt                # no model: the policy says its lines
  baton agent-try models/Qwen3-0.6B agents.structured=refuse
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command, other than those of its configuration."""
    parser.add_argument("model", nargs="?", type=Path, metavar="MODEL", help="a Hugging Face folder")
    parser.add_argument("--scripted", type=Path, metavar="FILE", help="the policy says the lines of this file")
