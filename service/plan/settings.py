"""The settings of a configuration that a plan needs."""

from __future__ import annotations

from dataclasses import dataclass

from service.config import Config
from service.config.learn import TrainerConfig, WeightsConfig
from service.config.rollout import DataConfig, GeneratorConfig
from service.learn.settings import FitSettings


@dataclass(frozen=True)
class PlanSettings:
    """The part of a configuration that memory, speed and waiting depend on."""

    name: str
    """Name of the run."""
    max_steps: int
    fit: FitSettings
    weights: WeightsConfig
    data: DataConfig
    lookahead: int
    """The setting `buffer.lookahead`, in mini-batches."""
    merges: bool
    """Whether the turns of a trajectory share a row."""
    env_turns: int
    """The setting `env.max_turns`."""
    most_turns: tuple[str, int]
    """The setting that limits the turns of a trajectory, and its value."""

    @classmethod
    def of(cls, config: Config) -> PlanSettings:
        """The settings from a configuration."""
        turns = {"env.max_turns": config.env.max_turns}
        if config.endpoint is not None:
            turns["agents.max_calls"] = config.endpoint.max_calls
        return cls(
            name=config.run.name,
            max_steps=config.run.max_steps,
            fit=FitSettings.of(config),
            weights=config.weights,
            data=config.data,
            lookahead=config.buffer.lookahead,
            merges=config.buffer.merge != "off",
            env_turns=config.env.max_turns,
            most_turns=max(turns.items(), key=lambda limit: limit[1]),
        )

    @property
    def generator(self) -> GeneratorConfig:
        """The settings of the engines."""
        return self.fit.generator

    @property
    def trainer(self) -> TrainerConfig:
        """The settings of the ranks."""
        return self.fit.learn.trainer

    @property
    def samples(self) -> int:
        """Number of trajectories of a group."""
        return self.fit.learn.algorithm.n_samples_per_prompt
