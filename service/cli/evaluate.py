"""`baton eval`: evaluates a model, a run or a checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path

ABOUT = """\
Evaluate a model, a run or a checkpoint on the evaluation sets (data.eval, data.eval_make_rows), without training.
"""

EXAMPLES = """\
examples:
  baton eval runs/gsm8k                                                # its final weights, or its newest checkpoint
  baton eval runs/gsm8k/checkpoints/step_40 data.eval_samples=8
  baton eval models/Qwen2.5-3B-Instruct --config configs/gsm8k.yaml --output before.json

A run is evaluated with its own configuration. The table has the mean reward, pass@k over data.eval_samples trajectories
of each prompt, the turns and sampled tokens of a trajectory, the fraction of responses that were cut at
generator.max_generate_length (cut), and the number of lost trajectories.

exit code: 0 evaluated, 2 the input is wrong (one line says what), 1 an engine failed, 128 + n stopped by signal n.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command, other than those of its configuration."""
    parser.add_argument("path", type=Path, metavar="PATH", help="a Hugging Face folder, a run folder or a checkpoint")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the results to this file, as JSON")
