"""Plays each trajectory in a container of your own image. The container reaches only the session's address.

    env:
      name: baton.examples.podman_agent:InPodman
      trusted_modules: [baton.examples]
      options: {image: "localhost/mine:1", agent: 'my-agent "$PROMPT"', score: '[ "$(cat colour.txt)" = blue ]'}

Both commands run in a shell of the container: the agent with the session's address and key, then the score without
them. The score's exit code 0 is the reward 1, and 1 is the reward 0. After any other code the trajectory is attempted
again. So a score must exit with 1 if the agent left no file: `grep` would exit with 2.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Container
from contextlib import suppress
from urllib.parse import urlsplit
from uuid import uuid4

from baton import AgentSession, Task

WALLS = ["--network=none", "--http-proxy=false", "--cap-drop=all", "--security-opt=no-new-privileges"]
OF_AGENT = {*range(256)} - {125}
"""Allowed exit codes of the agent. (With 125, podman itself failed.)"""
KEPT = 1 << 20
"""Maximum bytes of output, and of errors, that are kept: the last bytes."""
LISTEN = """import socket, sys
listener = socket.create_server((sys.argv[1], int(sys.argv[2])))
socket.send_fds(socket.socket(fileno=0), [b" "], [listener.fileno()])"""


class InPodman:
    """An agent in a container."""

    def __init__(self, image: str, agent: str, score: str, memory: str = "4g", seconds: int = 3600) -> None:
        """`seconds`: time limit after which podman ends the container, in case this process has died."""
        self.image, self.agent, self.score = image, agent, score
        self.limits = f"--memory={memory}", "--pids-limit=512", f"--timeout={seconds}"

    async def play(self, session: AgentSession, task: Task, seed: int) -> None:
        """Run the agent in a new container, then the score; removes the container."""
        name, url, prompt = f"baton-{uuid4().hex}", urlsplit(session.base_url), task.prompt[-1]["content"]
        given = {"OPENAI_BASE_URL": session.base_url, "OPENAI_API_KEY": session.key, "PROMPT": prompt}

        async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            policy, to_policy = await asyncio.open_connection(url.hostname, url.port)
            await asyncio.gather(copy(reader, to_policy), copy(policy, writer))

        try:
            await podman("run", "--detach", "--rm", "--name", name, *WALLS, *self.limits, self.image, "sleep", "999999")
            _, pid = await podman("inspect", "--format", "{{.State.Pid}}", name)
            listener = await asyncio.to_thread(listening_in, int(pid), url.hostname or "", url.port or 80)
            server = await asyncio.start_server(forward, sock=listener)
            try:
                shell = (*(f"--env={variable}" for variable in given), name, "sh", "-c", self.agent)
                code, said = await podman("exec", *shell, variables=given, allowed=OF_AGENT)
            finally:
                server.close()  # do not wait: its connections end with the container
            if code:
                session.finish(None, "failed", transcript=said, exit_code=code)
            else:
                code, _ = await podman("exec", name, "sh", "-c", self.score, allowed=range(2))
                session.finish(1.0 - code, transcript=said)
        finally:
            await podman("rm", "--force", "--ignore", "--time", "0", name)


def listening_in(pid: int, host: str, port: int) -> socket.socket:
    """A socket that listens at this address in the network namespace of another process."""
    ours, theirs = socket.socketpair()
    inside = ["nsenter", f"--net=/proc/{pid}/ns/net", sys.executable, "-c", LISTEN, host, str(port)]
    with ours, theirs:
        subprocess.run(inside, stdin=theirs.fileno(), timeout=60, check=True)
        _, (descriptor,), _, _ = socket.recv_fds(ours, 1, 1)
    return socket.socket(fileno=descriptor)


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Pass on the bytes that one side sends, until it ends."""
    with suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()


async def last(stream: asyncio.StreamReader | None) -> str:
    """The last bytes of a program's output, as text."""
    kept = b""
    while stream and (data := await stream.read(1 << 16)):
        kept = (kept + data)[-KEPT:]
    return kept.decode(errors="replace")


async def podman(
    *words: str, variables: dict[str, str] | None = None, allowed: Container[int | None] = (0,)
) -> tuple[int, str]:
    """Run podman. Returns its exit code and the end of its output. RuntimeError if the code is not in `allowed`."""
    out, environment = asyncio.subprocess.PIPE, {**os.environ, **(variables or {})}
    process = await asyncio.create_subprocess_exec("podman", *words, stdout=out, stderr=out, env=environment)
    try:
        said, problem = await asyncio.gather(last(process.stdout), last(process.stderr))
        await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
    if (code := process.returncode) not in allowed:
        raise RuntimeError(f"podman {words[0]}: exit code {code}: {problem[-500:]}")
    return code or 0, said + problem
