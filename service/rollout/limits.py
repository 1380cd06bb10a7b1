"""Limits of a trajectory and sampling parameters of its turns, from the run's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from service.config.rollout import EnvConfig, GeneratorConfig, RoleConfig
from service.rollout.engine import Sampling
from service.rollout.environment import MAIN

if TYPE_CHECKING:  # datasets are checked without importing transformers, which takes seconds
    from service.rollout.chat.chat import Chat
    from service.rollout.chat.conversation import Mode

MAX_OBSERVATION_CHARACTERS = 1 << 20
"""Maximum characters of one observation, over all texts and names of its messages; if an observation is longer, the
trajectory fails."""


@dataclass(frozen=True, slots=True)
class PlaySettings:
    """The parts of a run's configuration that are needed to play trajectories."""

    seed: int
    env: EnvConfig
    generator: GeneratorConfig
    roles: Mapping[str, RoleConfig]


@dataclass(frozen=True, slots=True)
class AgentLimits:
    """Limits of a trajectory, and the sampling parameters of its turns."""

    max_turns: int
    max_input_length: int
    """Maximum tokens of a turn's prompt."""
    step_deadline: float
    """Time limit of one call of the environment, in seconds."""
    request_deadline: float
    """Time limit of one turn in the engine, in seconds."""
    sampling: Sampling
    max_observation_characters: int = MAX_OBSERVATION_CHARACTERS
    conversation: Mode = "append"
    roles: Mapping[str, RoleConfig | None] = field(default_factory=lambda: {MAIN: None})
    """The roles that turns may have, with their settings; `main` has no settings."""

    @property
    def max_length(self) -> int:
        """Maximum tokens of a turn's prompt and response together; an appended end token counts."""
        return self.max_input_length + self.sampling.max_tokens + 1

    @staticmethod
    def of(settings: PlaySettings, chat: Chat) -> AgentLimits:
        """Take the limits and the sampling parameters from the configuration."""
        env, generator = settings.env, settings.generator
        return AgentLimits(
            max_turns=env.max_turns,
            max_input_length=generator.max_input_length,
            step_deadline=env.step_deadline,
            request_deadline=generator.request_deadline,
            sampling=Sampling.of(generator, chat.end_ids),
            conversation=generator.conversation,
            roles={MAIN: None, **settings.roles},
        )
