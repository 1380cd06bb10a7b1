"""Describes the trajectories of a run by figures: turns, lengths, environment times. Each figure has a source."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from service.errors import UserError
from service.plan.settings import PlanSettings


def _option(meaning: str, lowest: float, highest: float) -> Any:
    """A figure that is also an option of `baton plan`, and its bounds."""
    return field(metadata={"help": meaning, "bounds": (lowest, highest)})


@dataclass(frozen=True)
class Work:
    """Figures that describe the trajectories of a run: means, with lengths in tokens and times in seconds."""

    turns: float = _option("turns of a trajectory", 1.0, 1e5)
    prompt_tokens: float = _option("tokens of a trajectory's first prompt", 1.0, 1e9)
    response_tokens: float = _option("sampled tokens of a turn", 1.0, 1e9)
    observation_tokens: float = _option("tokens that the environment adds between two turns", 0.0, 1e9)
    sigma: float = _option("spread of trajectories' lengths: of the logarithm (0.5 moderate, 1.0 long tails)", 0.0, 5.0)
    environment_seconds: float = _option("seconds of one call of the environment", 0.0, 1e6)
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)
    """The source of each figure, by the figure's name."""

    @property
    def sampled(self) -> float:
        """Mean number of sampled tokens of a trajectory."""
        return self.turns * self.response_tokens

    @property
    def length(self) -> float:
        """Mean number of tokens of a trajectory whose turns share a row."""
        return self.prompt_tokens + self.sampled + max(0.0, self.turns - 1) * self.observation_tokens

    @property
    def mean_context(self) -> float:
        """Mean number of tokens in a request's KV cache, over the time of its generation."""
        return (self.prompt_tokens + self.length) / 2

    def row_tokens(self, merged: bool) -> float:
        """Mean number of tokens in the rows of a trajectory together: in one row if `merged`, otherwise in one row per
        turn."""
        return self.length if merged else self.turns * (self.prompt_tokens + self.length) / 2 + self.sampled / 2


OPTIONS = {option.name: option for option in fields(Work) if "help" in option.metadata}
ASSUMED = "assumed"
SIGMA = 0.6
"""Assumed spread of lengths if no figure is given: between the moderate and the long tails of docs/staleness.md."""


def assumed(settings: PlanSettings) -> Work:
    """The figures that are assumed if no others are known: about half of the maximum that the limits allow."""
    turns = (settings.env_turns + 1) / 2
    generator = settings.generator
    response = generator.max_generate_length / 2
    room = max(0.0, generator.max_input_length / 2 - (turns - 1) * response)
    prompt = max(1.0, room / max(1.0, turns))
    sources = {
        "turns": f"{ASSUMED}: the mean of 1 and env.max_turns {settings.env_turns}",
        "prompt_tokens": f"{ASSUMED}: prompt and observations fill half of generator.max_input_length",
        "response_tokens": f"{ASSUMED}: half of generator.max_generate_length {generator.max_generate_length}",
        "observation_tokens": f"{ASSUMED}: as long as the prompt",
        "sigma": f"{ASSUMED}: between moderate and long tails",
        "environment_seconds": f"{ASSUMED}: the environment answers at once",
    }
    return Work(turns, prompt, response, prompt if turns > 1 else 0.0, SIGMA, 0.0, sources)


def check_bounds(name: str, value: float, source: str = "given") -> None:
    """Raise a UserError if the figure `name` has a value outside the bounds of its option of `baton plan`.

    `source`: where the value comes from, for the message.
    """
    lowest, highest = OPTIONS[name].metadata["bounds"]
    if not lowest <= value <= highest:
        raise UserError(
            f"--{name.replace('_', '-')} {value:g} ({source}): give a number from {lowest:g} to {highest:g}"
        )


def work_of(
    settings: PlanSettings, measured: Mapping[str, tuple[float, str]], given: Mapping[str, float | None]
) -> Work:
    """The figures for a plan. A figure is taken from `given` (the options of `baton plan`) if it is there; otherwise
    from `measured`, which has (value, source) of each figure of a run; otherwise it is assumed.

    Raises:
        UserError: a figure is out of range, or a given figure is above its limit in the configuration.
    """
    work = assumed(settings)
    figures = {**measured, **{name: (value, "given") for name, value in given.items() if value is not None}}
    for name, (value, source) in figures.items():
        check_bounds(name, value, source)
    generator = settings.generator
    limits = {  # memory is planned for these limits
        "turns": settings.most_turns,
        "prompt_tokens": ("generator.max_input_length", generator.max_input_length),
        "response_tokens": ("generator.max_generate_length", generator.max_generate_length),
    }
    for name, (setting, allowed) in limits.items():
        if (value := given.get(name) or 0.0) > allowed:
            raise UserError(f"--{name.replace('_', '-')} {value:g}: {setting} allows {allowed}; give less, or raise it")
    values: dict[str, Any] = {name: value for name, (value, _) in figures.items()}
    sources = {**work.sources, **{name: source for name, (_, source) in figures.items()}}
    return replace(work, **values, sources=sources)


def lines_of(work: Work) -> Iterator[str]:
    """All figures as lines, with their sources."""
    for name in OPTIONS:
        yield f"{name.replace('_', ' ')} {getattr(work, name):.4g}: {work.sources[name]}"
