"""Runs a command once per trajectory, each time in a new folder, and returns the result.

    AgentRunner.run(task, base_url, key, seed) --> command process --> the command, its folder, its score
                                     Finished <--

A command process serves one trajectory at a time. If a command process is late, fails or loses its parent, its keeper
(`service.rollout.child_main`) ends it and all processes that the command started.
"""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path

from service.agents.runner.command_process import Finished, remove
from service.config.command import CommandConfig
from service.errors import in_one_line
from service.files import LOCK, is_locked, lock_folder
from service.rollout.child_process import ChildDied, ChildProcesses, ChildRaised
from service.rollout.environment import AgentSession, OversizedOutput, Task

log = logging.getLogger(__name__)

FOLDERS = "baton-agents-"
"""Prefix of the names of trajectories' folders, which lie in the folder for temporary files."""
AROUND_SECONDS = 300.0
"""Time limit, in seconds, to fill and to remove a trajectory's folder."""
BYTES_PER_CHARACTER = 6
"""Maximum bytes of JSON for one character (`\\u0000`)."""
ROOM = 1 << 16
"""Maximum bytes of a command process's answer without the transcript."""


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
    """Runs the commands of one generator or worker; the first run makes the folder of all runs."""

    def __init__(self, settings: CommandConfig) -> None:
        limits = settings.limits
        self._settings = settings.model_dump(mode="json")
        self._seconds = limits.seconds + limits.score_seconds + AROUND_SECONDS
        self._processes = ChildProcesses(
            "service.agents.runner.command_process", limits.transcript_characters * BYTES_PER_CHARACTER + ROOM
        )
        self._folder: Path | None = None
        self._held = ExitStack()
        """Holds the lock of the folder."""
        self._has_warned = False

    def make(self) -> CommandAgent:
        """An agent for one trajectory."""
        return CommandAgent(self)

    async def run(self, task: Task, base_url: str, key: str, seed: int) -> Finished:
        """Run the command for a task, and return its result. The command calls the policy at `base_url`
        (`http://HOST:PORT/.../v1`) with the session's `key`."""
        if self._folder is None:
            made = Path(tempfile.mkdtemp(prefix=f".{FOLDERS}"))
            self._held.enter_context(lock_folder(made, seconds=1.0))
            self._folder = made.rename(made.with_name(made.name.removeprefix(".")))  # appears with its lock
            await asyncio.to_thread(_remove_left_folders)
        root = Path(tempfile.mkdtemp(dir=self._folder))
        request = {
            "settings": self._settings,
            "task": asdict(task),
            "root": str(root),
            "base_url": base_url,
            "key": key,
            "seed": seed,
        }
        process = await self._processes.take()
        try:
            async with asyncio.timeout(self._seconds):
                answer = await process.ask(request)
        except TimeoutError:
            return _failed(f"there was no score after {self._seconds:g} s")
        except (ChildDied, ChildRaised, OversizedOutput) as error:
            return _failed(str(error).replace(key, "[key]"))
        finally:
            self._processes.give_back(process)
            if root.exists():
                await process.ended()
                await asyncio.to_thread(remove, root)
        self._warn_once(answer.pop("refused"))
        return Finished(**answer)

    async def close(self) -> None:
        """End all runs, and remove their folders."""
        await self._processes.close()
        if self._folder is not None:
            await asyncio.to_thread(remove, self._folder)
        self._held.close()

    def _warn_once(self, refused: str) -> None:
        if refused and not self._has_warned:
            self._has_warned = True
            log.warning(
                "commands run without namespaces, which this machine refuses (%s): they reach the network and the "
                "processes that Baton reaches",
                in_one_line(refused),
            )


def _failed(reason: str) -> Finished:
    return Finished(None, "failed", in_one_line(reason), {}, "")


def _remove_left_folders() -> None:
    """Remove folders that killed processes of this user left behind."""
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDERS}*"):
        with suppress(FileNotFoundError):  # another process removes it
            if folder.stat().st_uid == os.geteuid() and (folder / LOCK).exists() and not is_locked(folder):
                remove(folder)
