"""Runs a command once per trajectory, each time in a new folder, and returns the result.

A command process serves one trajectory at a time. If it is late, fails or loses its parent, its keeper
(`service.rollout.child_main`) ends it and all processes that the command started.
"""

from __future__ import annotations

import asyncio
import signal
import tempfile
from dataclasses import asdict
from pathlib import Path

from service.agents.command_process import Finished, remove
from service.config.agent_command import CommandConfig
from service.errors import in_one_line
from service.rollout.child_process import ChildDied, ChildProcesses, ChildRaised
from service.rollout.environment import AgentSession, OversizedOutput, Task

AROUND_SECONDS = 300.0
"""Time limit, in seconds, to fill and to remove a trajectory's folder."""
MAX_ANSWER_BYTES = 1 << 20
"""Maximum bytes of a command process's answer, whose transcript is bounded."""


class CommandAgent:
    """The agent of one trajectory, which runs the command."""

    def __init__(self, runner: AgentRunner) -> None:
        self._runner = runner

    async def play(self, session: AgentSession, task: Task, seed: int) -> None:
        """Run the command, and finish the session with its score; without a score, with the reward that the agent
        posted."""
        finished = await self._runner.run(task, session.base_url, session.key, seed)
        session.finish(**finished._asdict())


class AgentRunner:
    """Runs the commands of one generator."""

    def __init__(self, settings: CommandConfig) -> None:
        self._limits = settings.limits
        self._settings = settings.model_dump(mode="json")
        self._seconds = settings.limits.seconds + settings.limits.score_seconds + AROUND_SECONDS
        self._processes = ChildProcesses("service.agents.command_process", MAX_ANSWER_BYTES)

    def make(self) -> CommandAgent:
        """An agent for one trajectory."""
        return CommandAgent(self)

    async def run(self, task: Task, base_url: str, key: str, seed: int) -> Finished:
        """Run the command for a task, and return its result. The command calls the policy at `base_url`
        (`http://HOST:PORT/.../v1`) with the session's `key`."""
        root = Path(tempfile.mkdtemp(prefix="baton-agent-"))
        asked = {"settings": self._settings, "task": asdict(task), "root": str(root)}
        process = await self._processes.take()
        try:
            async with asyncio.timeout(self._seconds):
                answer = await process.ask({**asked, "base_url": base_url, "key": key, "seed": seed})
        except TimeoutError:
            return _failed(f"there was no score after {self._seconds:g} s")
        except (ChildDied, ChildRaised, OversizedOutput) as error:
            if isinstance(error, ChildDied) and error.code == -signal.SIGALRM:
                limit = self._limits.score_seconds
                return _failed(f"{self._settings['score']} was ended at limits.score_seconds ({limit:g})")
            return _failed(str(error).replace(key, "[key]"))
        finally:
            self._processes.give_back(process)
            if root.exists():
                await process.ended()
                await asyncio.to_thread(remove, root)
        return Finished(**answer)

    async def close(self) -> None:
        """End all runs."""
        await self._processes.close()


def _failed(reason: str) -> Finished:
    return Finished(None, "failed", in_one_line(reason), {}, "")
