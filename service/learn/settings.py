"""The settings with which the policy is trained."""

from __future__ import annotations

from dataclasses import dataclass

from service.config.learn import AlgorithmConfig, TrainerConfig
from service.config.tree import Config, ModelConfig


@dataclass(frozen=True)
class LearnSettings:
    """The settings with which the policy is trained."""

    model: ModelConfig
    trainer: TrainerConfig
    algorithm: AlgorithmConfig
    longest_row: int
    """Length in tokens of the longest row that the generator can make."""
    max_steps: int
    seed: int

    @classmethod
    def of(cls, config: Config) -> LearnSettings:
        """Take from a run's configuration the settings for training the policy."""
        return cls(
            model=config.model,
            trainer=config.trainer,
            algorithm=config.algorithm,
            longest_row=config.generator.longest_row,
            max_steps=config.run.max_steps,
            seed=config.run.seed,
        )
