"""An agent that runs the policy's reply as a command, and containers without podman-compose (configs/harbor_tiny.yaml).

Harbor's Python environment imports this module. Write your own agent like `OneCommand`: name the variable of its key in
`MODEL_CONNECTION`, and call `self._base_url`.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from harbor.agents.agent_auth_resolution import ModelConnectionSpec, ProviderAccess
from harbor.agents.base import BaseAgent
from harbor.agents.capabilities import AgentCapabilities
from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.podman import PodmanEnvironment
from harbor.models.agent.context import AgentContext
from openai import AsyncOpenAI


class OneCommand(BaseAgent):
    """Sends the instruction, unchanged, to the policy, and runs the reply in the container."""

    capabilities = AgentCapabilities(base_url=True)
    MODEL_CONNECTION = ModelConnectionSpec(agent_provider_access=ProviderAccess(["OPENAI_API_KEY"]))

    @staticmethod
    def name() -> str:
        """The agent's name in Harbor's results."""
        return "one-command"

    def version(self) -> str:
        """The agent's version in Harbor's results."""
        return "1"

    async def setup(self, environment: BaseEnvironment) -> None:
        """Install nothing."""

    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        """Play one trial. If the command fails, only the verifier judges it."""
        asked = [{"role": "user", "content": instruction.strip()}]
        async with AsyncOpenAI(
            base_url=self._base_url, api_key=self._get_env("OPENAI_API_KEY"), max_retries=8
        ) as client:
            said = await client.chat.completions.create(model="policy", messages=asked)
        await environment.exec(said.choices[0].message.content or "true", timeout_sec=30)


class PlainPodman(PodmanEnvironment):
    """A container of a task's `docker_image` without a network, for tasks with one container and no limits.

    Harbor's class calls podman-compose about 15 times for each trial; this class calls podman 7 times and saves 4 s of
    CPU.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "auto_mounting": True})  # no copying of the verifier's files
        self._name = f"{self.session_id.lower()}_main_1"

    async def start(self, force_build: bool) -> None:
        """Start the container."""
        mounts = [f"--volume={Path(mount['source']).absolute()}:{mount['target']}" for mount in self._host_mounts]
        options = ["--detach", "--init", "--network=none", f"--name={self._name}", *mounts]
        await self._podman(["run", *options, str(self.task_env_config.docker_image), "sleep", "infinity"])

    async def stop(self, delete: bool) -> None:
        """Remove the container."""
        await self._podman(["rm", "--force", "--ignore", "--time=0", self._name])

    async def _run_docker_compose_command(
        self,
        command: list[str],
        check: bool = True,
        timeout_sec: int | None = None,
        stdin_data: bytes | None = None,
        on_output: Any = None,
    ) -> ExecResult:
        """`cp FROM main:TO`, or `exec OPTION... main WORD...`."""
        if stdin_data is not None:  # Harbor sends data here only if `cp` has failed
            raise RuntimeError("podman cp failed")
        at = next(place for place, word in enumerate(command) if word.partition(":")[0] == "main")
        options = [word for word in command[:at] if word != "-T"]
        return await self._podman(
            [*options, command[at].replace("main", self._name, 1), *command[at + 1 :]], check, timeout_sec
        )

    async def _podman(self, words: list[str], check: bool = True, seconds: int | None = None) -> ExecResult:
        pipe, nothing = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
        process = await asyncio.create_subprocess_exec(
            "podman", *words, stdin=nothing, stdout=pipe, stderr=asyncio.subprocess.STDOUT
        )
        done = await self._collect_buffered_output(process, timeout_sec=seconds)
        if check and done.return_code:
            raise RuntimeError(f"podman {words[0]} ended with code {done.return_code}: {done.stdout}")
        return done
