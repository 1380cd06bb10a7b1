"""`baton simulate`: predicts the behaviour of a configuration without a GPU."""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial

from service.config import check, load
from service.config.command_line import no_more_words
from service.errors import UserError
from service.run.phases import phase
from service.simulate.measurements import Report
from service.simulate.scenario import Scenario, SimulationSettings
from service.simulate.world import World, simulated

ABOUT = """\
Run the real buffer under a virtual clock with simulated generators and a simulated trainer.

Reports throughput, waiting and staleness for a configuration and for lengths, times and costs.
A run's few longest trajectories have much influence: --seeds N reports the mean of N runs and its standard error.
"""

EXAMPLES = """\
examples:
  baton simulate --sigma 1.0 buffer.lookahead=4                     # long-tailed lengths
  baton simulate --sigma 1.0 buffer.lookahead=8 buffer.order=strict --seeds 16
  baton simulate --config mine.yaml --token-seconds 0.03 --trainer-seconds 40
  baton simulate --generators 200 generator.concurrent_groups=800 trainer.mini_batch_size=256
"""

QUIET_SECONDS = 2.0
"""Seconds after which a line says that the simulation continues."""

PRESET = (
    "env.max_turns=1",
    "generator.concurrent_groups=64",
    "generator.max_input_length=64",
    "generator.max_generate_length=16384",
    "buffer.lookahead=4",
    "buffer.max_staleness=8",
    "buffer.step_deadline=1e6",
    "buffer.lease_deadline=1e6",
    "buffer.max_bytes=1099511627776",
    "trainer.mini_batch_size=32",
    "trainer.ranks=1",
    "trainer.max_tokens_per_micro_batch=131072",
)
"""Settings that apply if no configuration is given: 64 groups of 8 trajectories at once, mini-batches of 32 groups, and
room for the longest trajectories, because a limit on the length would cut off the tail of the distribution."""

NOT_SIMULATED = ("model.", "data.train", "run.")
"""Names of settings, or beginnings of names, that have no influence on a simulation."""

OPTIONS = {option.name: option for option in fields(Scenario) if "help" in option.metadata}
MIN_CUT = 0.005
"""If a smaller fraction of the lengths is cut by the limits, no note is printed about it: the note would say 0%."""
BOUNDS = {name: option.metadata["bounds"] for name, option in OPTIONS.items()} | {"seed": (0, 2**32), "seeds": (1, 1e4)}
"""The smallest and the largest value of each option."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's own arguments, in addition to configuration files and settings."""
    for name, option in OPTIONS.items():
        kind = float if option.default is None else type(option.default)
        configured = f"; with --config: {option.metadata['configured']}" if option.metadata["configured"] else ""
        default = "" if option.default is None else f" (default {option.default}{configured})"
        meaning = option.metadata["help"] + default
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="X", help=meaning)
    parser.add_argument("--seed", type=int, default=0, help="seed of the first run")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="report the means of N runs (default 1)")


def run(arguments: argparse.Namespace, overrides: list[str]) -> int:
    """Simulate a configuration."""
    no_more_words(arguments)
    config, source = load(arguments.config, [*([] if arguments.config else PRESET), *overrides])
    check(config, source, NOT_SIMULATED)
    given = {name: value for name in OPTIONS if (value := getattr(arguments, name)) is not None}
    scenario = Scenario.of(config, given) if arguments.config else Scenario(**given)
    return simulate(SimulationSettings.of(config), scenario, arguments)


def simulate(settings: SimulationSettings, scenario: Scenario, arguments: argparse.Namespace) -> int:
    """Run the simulations that the arguments ask for, and print the findings."""
    for name, (lowest, highest) in BOUNDS.items():
        value = getattr(scenario, name, getattr(arguments, name))
        if value is not None and not lowest <= value <= highest:
            raise UserError(f"--{name.replace('_', '-')} {value}: give a number from {lowest:g} to {highest:g}")
    if scenario.turns > (max_turns := settings.buffer.limits.max_turns):
        raise UserError(f"--turns {scenario.turns}: set env.max_turns={scenario.turns} too, it is {max_turns}")
    seeds = range(arguments.seed, arguments.seed + arguments.seeds)
    on_policy = replace(settings, buffer=replace(settings.buffer, lookahead=0))
    short = replace(scenario, steps=min(scenario.steps, 60))
    progress = _Progress(2 * len(seeds))
    with phase("simulating", partial(print, file=sys.stderr, flush=True), progress.words, after=QUIET_SECONDS):
        runs = [
            (simulated(settings, scenario, seed, progress.watch), simulated(on_policy, short, seed, progress.watch))
            for seed in seeds
        ]
    named = f"seed {seeds[0]}" if len(seeds) == 1 else f"means of seeds {seeds[0]} to {seeds[-1]}, ± standard error"
    print(f"{named}, {scenario.steps} optimizer steps of {settings.buffer.mini_batch_size} groups")
    figures = {name: getattr(scenario, name) for name in OPTIONS if name != "steps"}
    figures["trainer_seconds"] = scenario.step_seconds(settings)
    words = ", ".join(
        f"{name.replace('_', ' ')} {value:.4g}{_source(name, arguments)}" for name, value in figures.items()
    )
    print(f"given or assumed        {words}")
    if (cut := scenario.cut(settings)) >= MIN_CUT:
        print(f"note: the limits on turns and generator.max_generate_length cut {cut:.0%} of the lengths")
    for line in _lines(runs, settings.max_staleness):
        print(line)
    return 0


class _Progress:
    """How far the simulations are, in words."""

    def __init__(self, runs: int) -> None:
        self._world: World | None = None
        self._runs, self._begun = runs, 0

    def watch(self, world: World) -> None:
        """The next simulation begins."""
        self._world, self._begun = world, self._begun + 1

    def words(self) -> str:
        """The step that is simulated; empty before the first simulation."""
        if self._world is None:
            return ""
        steps = self._world.scenario.steps
        step = min(len(self._world.measured.committed_at) + 1, steps)
        return f"step {step} of {steps} in run {self._begun} of {self._runs}"


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean of a figure over several runs, and the standard error of this mean; the error is 0 for a single run.

    >>> mean_and_error([1.0, 3.0])
    (2.0, 1.0)
    """
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return statistics.fmean(values), spread / math.sqrt(len(values))


def _source(name: str, arguments: argparse.Namespace) -> str:
    """In brackets, how a figure was assumed from the configuration; otherwise empty."""
    rule = OPTIONS[name].metadata["configured"]
    return f" ({rule})" if rule and arguments.config and getattr(arguments, name) is None else ""


def _lines(runs: Sequence[tuple[Report, Report]], max_staleness: int) -> list[str]:
    """Lines with the findings of the runs, and of the same runs on-policy."""
    reports, bases = [run for run, _ in runs], [base for _, base in runs]

    def formatted(values: Sequence[float], form: str) -> str:
        mean, error = mean_and_error(values)
        return f"{mean:{form}}" + (f" ± {error:{form}}" if len(values) > 1 else "")

    def fraction(waits: Sequence[float], on_policy: Sequence[float]) -> str:
        return f"{formatted(waits, '.1%')}   (on-policy {formatted(on_policy, '.1%')})"

    waits = fraction([r.trainer_wait for r in reports], [b.trainer_wait for b in bases])
    idle = fraction([r.generator_wait for r in reports], [b.generator_wait for b in bases])
    beyond = formatted([r.beyond for r in reports], ".2%")
    return [
        f"speed over on-policy    {formatted([r.steps_per_second / b.steps_per_second for r, b in runs], '.2f')} x",
        f"trained tokens          {formatted([r.tokens_per_second for r in reports], '.0f')} /s",
        f"trainer waits           {waits}",
        f"generator slots idle    {idle}",
        f"token staleness         mean {formatted([r.staleness_mean for r in reports], '.2f')}, "
        f"p99 {max(r.staleness_p99 for r in reports)}, max {max(r.staleness_max for r in reports)} versions",
        f"tokens beyond {max_staleness:<3}       {beyond} carried no loss",
        f"length distance         {formatted([r.length_distance for r in reports], '.3f')}   "
        "(generated against trained, 0 is none)",
    ]
