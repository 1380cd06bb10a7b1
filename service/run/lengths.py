"""Measures turns, lengths and times of a run's trajectories, for `baton plan --lengths RUN`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from service.errors import UserError
from service.run.folder import METRICS, TIMELINE, read_lines, run_folder
from service.run.timeline import SLOW, read_timeline
from service.run.trajectories import find_recorded_run, load_records

OUTSIDE = ("environment", "other")
"""Parts of a trajectory's time in which no engine works for the trajectory."""


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
    if (outside := _outside(folder)) is not None:
        seconds, count = outside
        where = f"{TIMELINE} of {folder.name}, outside of the engines in each turn of {count} trajectories"
        found["environment_seconds"] = (seconds / turns, where)
    if lengths:
        logs = [math.log(length) for length in lengths]
        found["prompt_tokens"] = (statistics.fmean(prompts), kept)
        if len(logs) > 1:
            found["sigma"] = (statistics.stdev(logs), kept)
    return found


def _outside(folder: Path) -> tuple[float, int] | None:
    """Mean seconds of a trajectory outside of the engines, over the second half of a run, and the number of
    trajectories.

    None if the timeline has no trajectories.

    Raises:
        UserError: the timeline is damaged.
    """
    if not any((folder / TIMELINE).glob("*.jsonl")):
        return None
    found = [one for one in read_timeline(folder).trajectories if one.why != SLOW]
    if not found:
        return None
    middle = (found[0].span.began + found[-1].span.began) / 2
    late = [sum(one.parts.get(part, 0.0) for part in OUTSIDE) for one in found if one.span.began >= middle]
    return statistics.fmean(late), len(late)


def _recorded(folder: Path) -> tuple[Sequence[int], Sequence[int]]:
    """First-prompt tokens and sampled tokens of the trajectories in the run's sample."""
    try:
        records = load_records(find_recorded_run(str(folder)))
    except UserError:  # the run kept no trajectories: use its metrics
        return [], []
    full = [record for record in records if record["steps"] and record["sampled_tokens"]]
    return [len(each["steps"][0]["prompt_ids"]) for each in full], [each["sampled_tokens"] for each in full]
