"""The player of a run's engine: it plays trajectories with `service.rollout`, and serves agents if the run has them."""

from __future__ import annotations

from pathlib import Path

from service.agents.agents import Agents
from service.agents.runner.runner import AgentRunner
from service.agents.session_keys import Keys
from service.config import Config
from service.rollout.chat.chat import Chat
from service.rollout.engine import Engine
from service.rollout.limits import AgentLimits, PlaySettings
from service.rollout.player import Player


class RunPlayer(Player[Agents]):
    """Plays the trajectories of a configured run on one engine."""

    def __init__(
        self,
        config: Config,
        model_folder: Path,
        engine: Engine,
        keys: Keys | None = None,
        number: int = 0,
    ) -> None:
        """Store the settings. `keys`: the keys of the run's agents; `number`: the number of this generator, from 0."""
        endpoint = config.endpoint

        def agents(chat: Chat, timed: Engine, limits: AgentLimits) -> Agents | None:
            return None if endpoint is None else Agents(endpoint, chat, timed, limits, keys, number)

        settings = PlaySettings(config.run.seed, config.env, config.generator, config.roles)
        super().__init__(settings, model_folder, engine, agents, AgentRunner(config.env))
