"""What the trajectories of a run look like: turns, lengths, times of the environment; each figure with its source."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from service.config import Config
from service.errors import UserError
from service.run.folder import METRICS, TIMELINE, read_lines, run_folder
from service.trace.files import read_trace
from service.trace.slow import SLOW
from service.trace.timeline import Timeline
from service.trace.trajectories.records import find_recorded_run, load_records


def _option(meaning: str, lowest: float, highest: float) -> Any:
    """A figure that is also an option of `baton plan`, and its bounds."""
    return field(metadata={"help": meaning, "bounds": (lowest, highest)})


@dataclass(frozen=True)
class Work:
    """Means over trajectories; lengths in tokens, times in seconds."""

    turns: float = _option("turns of a trajectory", 1.0, 1e5)
    prompt_tokens: float = _option("tokens of a trajectory's first prompt", 1.0, 1e9)
    response_tokens: float = _option("sampled tokens of a turn", 1.0, 1e9)
    observation_tokens: float = _option("tokens that the environment adds between two turns", 0.0, 1e9)
    sigma: float = _option("spread of trajectories' lengths: of the logarithm (0.5 moderate, 1.0 long tails)", 0.0, 5.0)
    environment_seconds: float = _option("seconds of one call of the environment", 0.0, 1e6)
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Where each figure comes from, by its name."""

    @property
    def sampled(self) -> float:
        """Sampled tokens of a trajectory."""
        return self.turns * self.response_tokens

    @property
    def length(self) -> float:
        """Tokens of a trajectory whose turns share a row."""
        return self.prompt_tokens + self.sampled + max(0.0, self.turns - 1) * self.observation_tokens

    @property
    def mean_context(self) -> float:
        """Tokens in the KV cache of a request, over the time of its generation."""
        return (self.prompt_tokens + self.length) / 2

    def row_tokens(self, merged: bool) -> float:
        """Tokens of the rows of a trajectory: one row where turns are merged, else one for each turn."""
        return self.length if merged else self.turns * (self.prompt_tokens + self.length) / 2 + self.sampled / 2

    def longest_of(self, count: float) -> float:
        """Length of the longest of so many trajectories, over the mean: the quantile 1 - 1 / (count + 1).

        >>> work = assumed(Config())
        >>> work.longest_of(1) < 1 < work.longest_of(64) < work.longest_of(1024)
        True
        """
        normal = statistics.NormalDist()
        return math.exp(self.sigma * normal.inv_cdf(count / (count + 1)) - self.sigma**2 / 2)


OPTIONS = {option.name: option for option in fields(Work) if "help" in option.metadata}
ASSUMED = "assumed"
OUTSIDE = ("environment", "other")
"""Parts of a trajectory's time in which no engine works for it."""
SIGMA = 0.6
"""Spread of lengths where nothing says it: between the moderate and the long tails of docs/staleness.md."""


def assumed(config: Config) -> Work:
    """The work where nothing is said: half of what the limits allow."""
    turns = (config.env.max_turns + 1) / 2
    generator = config.generator
    response = generator.max_generate_length / 2
    room = max(0.0, generator.max_input_length / 2 - (turns - 1) * response)
    prompt = max(1.0, room / max(1.0, turns))
    sources = {
        "turns": f"{ASSUMED}: the mean of 1 and env.max_turns {config.env.max_turns}",
        "prompt_tokens": f"{ASSUMED}: prompt and observations fill half of generator.max_input_length",
        "response_tokens": f"{ASSUMED}: half of generator.max_generate_length {generator.max_generate_length}",
        "observation_tokens": f"{ASSUMED}: as long as the prompt",
        "sigma": f"{ASSUMED}: between moderate and long tails",
        "environment_seconds": f"{ASSUMED}: the environment answers at once",
    }
    return Work(turns, prompt, response, prompt if turns > 1 else 0.0, SIGMA, 0.0, sources)


def of_run(run: str) -> dict[str, tuple[float, str]]:
    """The figures that the files of a run hold, each with its source, over the second half of its steps.

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
        except OverflowError:  # a whole number beyond every float
            return math.inf

    turns, sampled = max(mean("generate/avg_num_turns"), 1.0), mean("generate/avg_assistant_tokens")
    after_prompt = mean("generate/avg_num_tokens")
    where = f"{METRICS} of {folder.name}, mean of the last {len(lines)} steps"
    found = {
        "turns": (turns, where),
        "response_tokens": (max(sampled / turns, 1.0), where),
        "observation_tokens": (max((after_prompt - sampled) / max(turns - 1, 1.0), 0.0), where),
    }
    prompts, lengths = _kept(folder)
    kept = f"trajectories.jsonl of {folder.name}, {len(lengths)} kept trajectories"
    if (outside := _outside(folder)) is not None:
        seconds, count = outside
        where = f"{TIMELINE} of {folder.name}, outside of the engines in each turn of {count} trajectories"
        found["environment_seconds"] = (seconds / turns, where)
    if lengths:
        logs = [math.log(length) for length in lengths]
        found["prompt_tokens"] = (statistics.fmean(prompts), kept)
        found["sigma"] = (statistics.stdev(logs) if len(logs) > 1 else SIGMA, kept)
    return found


def _outside(folder: Path) -> tuple[float, int] | None:
    """Seconds of a trajectory outside of the engines, mean over the later half of a run, and of how many trajectories.

    None where the timeline has none.

    Raises:
        UserError: the timeline is damaged.
    """
    if not any((folder / TIMELINE).glob("*.jsonl")):
        return None
    try:
        found = [one for one in Timeline(read_trace(folder)).trajectories if one.why != SLOW]
    except (LookupError, TypeError, ValueError) as error:
        raise UserError(f"--lengths: {folder / TIMELINE} cannot be read: {error!r:.200}") from None
    if not found:
        return None
    middle = (found[0].span.began + found[-1].span.began) / 2
    late = [sum(one.parts.get(part, 0.0) for part in OUTSIDE) for one in found if one.span.began >= middle]
    return statistics.fmean(late), len(late)


def _kept(folder: Path) -> tuple[Sequence[int], Sequence[int]]:
    """Tokens of first prompts and sampled tokens of the trajectories that a run kept."""
    try:
        records = load_records(find_recorded_run(str(folder)))
    except UserError:  # the run kept none: then its metrics have to do
        return [], []
    full = [record for record in records if record["steps"] and record["sampled_tokens"]]
    return [len(each["steps"][0]["prompt_ids"]) for each in full], [each["sampled_tokens"] for each in full]


def work_of(config: Config, run: str | None, given: Mapping[str, float | None]) -> Work:
    """The work of a configuration: figures that are given, else those of a run, else assumed ones.

    Raises:
        UserError: a figure is not a possible one, or there is no such run.
    """
    work = assumed(config)
    figures = of_run(run) if run is not None else {}
    figures |= {name: (value, "given") for name, value in given.items() if value is not None}
    for name, (value, source) in figures.items():
        lowest, highest = OPTIONS[name].metadata["bounds"]
        if not lowest <= value <= highest:
            raise UserError(
                f"--{name.replace('_', '-')} {value:g} ({source}): give a number from {lowest:g} to {highest:g}"
            )
    for name, (setting, allowed) in _limits(config).items():
        if (value := given.get(name) or 0.0) > allowed:
            raise UserError(f"--{name.replace('_', '-')} {value:g}: {setting} allows {allowed}; give less, or raise it")
    values: dict[str, Any] = {name: value for name, (value, _) in figures.items()}
    sources = {**work.sources, **{name: source for name, (_, source) in figures.items()}}
    return replace(work, **values, sources=sources)


def _limits(config: Config) -> dict[str, tuple[str, int]]:
    """What the configuration allows: memory is planned for it."""
    generator = config.generator
    return {
        "turns": ("env.max_turns" if config.endpoint is None else "endpoint.max_calls", config.most_steps),
        "prompt_tokens": ("generator.max_input_length", generator.max_input_length),
        "response_tokens": ("generator.max_generate_length", generator.max_generate_length),
    }


def lines_of(work: Work) -> Iterator[str]:
    """Every figure with its source."""
    for name in OPTIONS:
        yield f"{name.replace('_', ' ')} {getattr(work, name):.4g}: {work.sources[name]}"
