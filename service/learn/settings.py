"""The settings of a learner, and of its memory estimate."""

from __future__ import annotations

from dataclasses import dataclass

from service.config.learn import AlgorithmConfig, TrainerConfig
from service.config.rollout import GeneratorConfig
from service.config.tree import Config, ModelConfig


@dataclass(frozen=True)
class LearnSettings:
    """The settings of a learner."""

    model: ModelConfig
    trainer: TrainerConfig
    algorithm: AlgorithmConfig
    longest_row: int
    """Length of the longest row that the generator can make, in tokens."""
    verify_tolerance: float
    """`weights.verify_tolerance`: log-ratio in nats above which engine and trainer count as different."""
    max_steps: int
    seed: int

    @classmethod
    def of(cls, config: Config) -> LearnSettings:
        """The settings from a configuration."""
        return cls(
            model=config.model,
            trainer=config.trainer,
            algorithm=config.algorithm,
            longest_row=config.generator.longest_row,
            verify_tolerance=config.weights.verify_tolerance,
            max_steps=config.run.max_steps,
            seed=config.run.seed,
        )


@dataclass(frozen=True)
class FitSettings:
    """Settings that determine how much memory a rank and an engine need on their GPUs."""

    learn: LearnSettings
    generator: GeneratorConfig
    shares_gpus: bool
    """Whether each rank shares its GPU with an engine (`weights.transport: ipc`)."""

    @classmethod
    def of(cls, config: Config) -> FitSettings:
        """The settings from a configuration."""
        return cls(LearnSettings.of(config), config.generator, config.weights.transport == "ipc")
