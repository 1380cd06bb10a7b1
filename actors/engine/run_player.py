"""The player of a run's engine: it plays trajectories with `service.rollout`, and serves agents if the run has them."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from actors.engine.agents import agents_of
from service.agents.agents import GatewayRoute
from service.agents.commands import AgentRunner
from service.config import Config
from service.rollout.engine import Engine, PlaySettings
from service.rollout.player import Player
from service.rollout.run_secret import RunSecret


class RunPlayer(Player):
    """Plays the trajectories of a configured run on one engine."""

    def __init__(
        self,
        config: Config,
        model_folder: Path,
        engine: Engine,
        secret: RunSecret | None = None,
        number: int = 0,
        route: GatewayRoute | None = None,
    ) -> None:
        """Store the settings. `secret`: the run's secret, for the keys of agents; `number`: the number of this
        generator, from 0; `route`: the way of agents' requests through the run's gateway."""
        settings = PlaySettings(config.run.seed, config.env, config.generator, config.roles)
        super().__init__(
            settings,
            model_folder,
            engine,
            agents=partial(agents_of, config.endpoint, model_folder, secret, number, route),
            commands=AgentRunner(config.env),
        )
