"""Measures turns, lengths and times of a run's trajectories, for `baton plan --lengths RUN`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from service.errors import UserError
from service.run.folder import METRICS, read_lines, run_folder
from service.run.trajectories import find_recorded_run, load_records


def lengths_of_run(run: str) -> dict[str, tuple[float, str]]:
    """Measurements of a run for `baton plan`: for each input of the plan, its value and where it comes from. Values are
    means over the second half of the run's steps, or statistics of the run's recorded trajectories.

    Raises:
        UserError: there is no such run, it has made no step, or its metrics are damaged.
    """
    folder = run_folder(run)
    try:
        lines = list(read_lines(folder / METRICS))
    except (ValueError, RecursionError) as error:
        raise UserError(f"--lengths {run}: {folder / METRICS} cannot be read: {error}") from None
    lines = lines[len(lines) // 2 :]
    if not lines:
        raise UserError(f"--lengths {run}: {folder} has no optimizer step in {METRICS}; name a run that has trained")

    def mean(key: str) -> float:
        found = [line[key] for line in lines if isinstance(line, dict) and isinstance(line.get(key), int | float)]
        if not found:
            raise UserError(f"--lengths {run}: {folder / METRICS} has no {key}; name a run of this version of Baton")
        try:
            return statistics.fmean(found)
        except OverflowError:  # an integer too large for a float
            return math.inf

    turns, sampled = max(mean("generate/avg_num_turns"), 1.0), mean("generate/avg_assistant_tokens")
    after_prompt = mean("generate/avg_num_tokens")
    where = f"{METRICS} of {folder.name}, mean of the last {len(lines)} steps"
    found = {
        "turns": (turns, where),
        "response_tokens": (max(sampled / turns, 1.0), where),
        "observation_tokens": (max((after_prompt - sampled) / max(turns - 1, 1.0), 0.0), where),
    }
    prompts, lengths = _recorded(folder)
    kept = f"trajectories.jsonl of {folder.name}, {len(lengths)} kept trajectories"
    if lengths:
        logs = [math.log(length) for length in lengths]
        found["prompt_tokens"] = (statistics.fmean(prompts), kept)
        if len(logs) > 1:
            found["sigma"] = (statistics.stdev(logs), kept)
    return found


def _recorded(folder: Path) -> tuple[Sequence[int], Sequence[int]]:
    """First-prompt tokens and sampled tokens of the trajectories in the run's sample."""
    try:
        records = load_records(find_recorded_run(str(folder)))
    except UserError:  # the run kept no trajectories: use its metrics
        return [], []
    full = [record for record in records if record["steps"] and record["sampled_tokens"]]
    return [len(each["steps"][0]["prompt_ids"]) for each in full], [each["sampled_tokens"] for each in full]
