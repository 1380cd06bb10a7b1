"""`baton replay`: forms one mini-batch of a run again from its journal, to inspect a loss without a GPU."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from service.config import load
from service.config.core_settings import batch_settings, message_limits
from service.config.paths import check_output
from service.errors import UserError
from service.handoff.steps.wire import encode_mini_batch
from service.run.folder import CONFIG, JOURNAL, run_folder
from service.run.recorded import replayed
from service.types import MiniBatch

ABOUT = """\
Form the mini-batch of one optimizer step again, bit by bit, from a run's journal.

Needs the run from its beginning: buffer.record: true keeps what the journal would otherwise give up.
"""

EXAMPLES = """\
examples:
  baton replay runs/quickstart --step 50
  baton replay runs/quickstart --step 50 --out step50.batch   # the bytes that the trainer got
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("run", type=Path, metavar="RUN", help="a run folder, or the name of a run")
    parser.add_argument("--step", type=int, required=True, metavar="N", help="the optimizer step")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the encoded mini-batch here")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def run(arguments: argparse.Namespace, overrides: list[str]) -> int:
    """Print the content of the mini-batch."""
    if arguments.out is not None:
        check_output(arguments.out, "--out")
    folder = run_folder(arguments.run)
    journal = folder / JOURNAL
    if not journal.is_dir():
        raise UserError(f"{folder}: this run has no journal")
    config = load([folder / CONFIG], []).config
    batch = replayed(message_limits(config), batch_settings(config), journal, arguments.step)
    if arguments.out is not None:
        arguments.out.write_bytes(encode_mini_batch(batch))
    print(json.dumps(_values(batch), indent=2) if arguments.json else "\n".join(_lines(batch, arguments.step)))
    return 0


def _values(batch: MiniBatch) -> dict[str, object]:
    return {
        "lease": batch.lease,
        "groups": list(batch.groups),
        "group_of_trajectory": batch.prompt_of_trajectory_G.tolist(),
        "returns": batch.return_G.tolist(),
        "advantages": batch.advantage_G.tolist(),
        "loss_tokens": batch.loss_tokens_G.tolist(),
        "metrics": batch.metrics,
    }


def _lines(batch: MiniBatch, step: int) -> list[str]:
    lines = [f"step {step}: {len(batch.groups)} groups, {len(batch.return_G)} trajectories, lease {batch.lease}"]
    for place, group_id in enumerate(batch.groups):
        of_G = batch.prompt_of_trajectory_G == place
        returns = " ".join(f"{value:g}" for value in batch.return_G[of_G])
        advantages = " ".join(f"{value:+.2f}" for value in batch.advantage_G[of_G])
        lines.append(f"group={group_id}  returns {returns}  advantages {advantages}")
    lines += [f"{name:40s} {value:g}" for name, value in sorted(batch.metrics.items())]
    return lines
