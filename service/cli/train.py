"""`baton run`: trains a policy."""

from __future__ import annotations

import argparse

ABOUT = """\
Run a training: start Ray, or connect to the cluster that RAY_ADDRESS names; prepare the model and the data; train;
write the run folder.
"""

EXAMPLES = """\
examples:
  baton run --config configs/quickstart.yaml
  baton run --config configs/quickstart.yaml buffer.lookahead=0        # strictly on-policy
  baton run --config mine.yaml model.path=models/qwen3-0.6b data.train=data/train.jsonl
  baton run --resume runs/quickstart                                   # continue a run that was stopped or killed
  baton run --resume s3://bucket/run                                   # ... on another machine, from its run.store

Ctrl-C ends the run in order: the optimizer step is finished and the final weights are written. After run.stop_grace
seconds, or at the third Ctrl-C, the run is ended by force. --resume also writes final/ where only that is missing.

exit code: 0 finished, 2 the input is wrong (one line says what), 1 the run failed, 128 + n stopped by signal n.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command, other than those of its configuration."""
    text = "continue a run from its newest checkpoint, with its configuration: its folder, name or store address"
    parser.add_argument("--resume", metavar="RUN", help=text)
