"""The configured command as the agent of one trajectory: run, scored, and its session finished."""

from __future__ import annotations

import logging
from typing import cast

from service.agents.runner.runner import AgentRunner
from service.config.command import CommandConfig
from service.errors import in_one_line
from service.rollout.environment import AgentSession, Status, Task

log = logging.getLogger(__name__)


class CommandAgent:
    """One run of the command."""

    def __init__(self, runner: AgentRunner) -> None:
        self._runner = runner

    async def play(self, session: AgentSession, task: Task, seed: int) -> None:
        """Run the command, and finish the session with its score; without one, with what the agent posted."""
        finished = await self._runner.run(task, session.base_url, session.key, seed)
        if finished.reason:
            log.warning("the command for prompt %s: %s", in_one_line(task.uid), finished.reason)
        session.finish(finished.reward, cast(Status, finished.status), finished.info, finished.transcript)


class CommandAgents:
    """Makes the agents of the configured command; what runs it begins with the first."""

    def __init__(self, settings: CommandConfig) -> None:
        self._settings = settings
        self._runner: AgentRunner | None = None

    def make(self) -> CommandAgent:
        """An agent for one trajectory."""
        self._runner = self._runner or AgentRunner(self._settings)
        return CommandAgent(self._runner)

    async def close(self) -> None:
        """End all commands."""
        if self._runner is not None:
            await self._runner.close()
