"""A buffer, a generator and an agent as processes of their own, without Ray, to be killed at any moment.

python -m tests.pure.agents.outside buffer FOLDER       the real buffer actor, and a trainer of whatever comes
python -m tests.pure.agents.outside generator FOLDER    the real generator; its policy says random words
python -m tests.pure.agents.outside worker FOLDER       starts an agent for each session that was handed on
python -m tests.pure.agents.outside agent FOLDER        talks to the policy, and notes every answer that it got
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

SILENCE = 5.0
"""Seconds without a request after which a session is lost."""
TURNS = 4
PATIENCE = 60.0
"""Seconds for which an agent asks again."""
WORDS = 6
"""Words of a reply; they say which sampled call it is."""


def send(url: str, body: bytes, key: str) -> Any:
    request = urllib.request.Request(url, body, {"Authorization": f"Bearer {key}", "Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        return json.load(answer)


def agent(folder: Path) -> None:
    """Every answer is noted before the next call; a call without an answer is sent again."""
    url, key, prompt = json.loads(sys.stdin.read())
    messages = [{"role": "user", "content": prompt}]
    for turn in range(TURNS):
        body, until = json.dumps({"model": "policy", "messages": messages}).encode(), time.monotonic() + PATIENCE
        while True:
            try:
                message = send(f"{url}/chat/completions", body, key)["choices"][0]["message"]
                break
            except urllib.error.HTTPError as error:
                if error.code < 500:
                    sys.exit(f"turn {turn}: status {error.code}")
            except OSError:
                if time.monotonic() > until:
                    raise
            time.sleep(0.1)
        line = json.dumps([url.split("/s/")[1].removesuffix("/v1"), message["content"]])
        with (folder / "answers.txt").open("a") as file:
            file.write(f"{line}\n")
        messages += [message, {"role": "user", "content": "none"}]
    name = url.split("/s/")[1].removesuffix("/v1")
    with suppress(urllib.error.HTTPError):  # the session is over
        send(f"{url.split('/s/')[0]}/rl/sessions/{name}/finish", b'{"reward": 0.5}', key)


def work(folder: Path) -> None:
    """Run an agent for each session, once; a session whose agent died is lost by its silence."""
    running: list[subprocess.Popen[bytes]] = []
    while True:
        for file in (folder / "handed").glob("*.json"):
            with suppress(FileNotFoundError):
                told = file.replace(file.with_suffix(".taken")).read_bytes()
                words = [sys.executable, __file__, "agent", str(folder)]
                running.append(subprocess.Popen(words, stdin=subprocess.PIPE))
                pipe = running[-1].stdin
                if pipe is not None:
                    pipe.write(told)
                    pipe.close()
        running = [process for process in running if process.poll() is None]
        time.sleep(0.05)


# -- the other processes load more -----------------------------------------------------------


def address(folder: Path) -> str:
    return str(folder / "buffer.sock")


def settings(folder: Path) -> Any:
    from service.config import Config

    return Config.model_validate(json.loads((folder / "config.json").read_text()))


def secret() -> Any:
    from service.rollout.run_secret import RunSecret

    return RunSecret(b"secret of this run")


class HandsOn:
    """Hands on each session through a file."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder) / "handed"

    async def play(self, session: Any, task: Any, seed: int) -> None:
        name = session.base_url.split("/s/")[1].removesuffix("/v1")
        told = [session.base_url, session.key, task.prompt[0]["content"]]
        (self._folder / name).write_text(json.dumps(told))
        (self._folder / name).rename(self._folder / f"{name}.json")
        await session.until_finished(SILENCE)

    async def resume(self, session: Any, task: Any, seed: int) -> None:
        await session.until_finished(SILENCE)


class NoHub:
    """Takes no metrics."""

    push = SimpleNamespace(remote=lambda *told: None)


async def serve_buffer(folder: Path) -> None:
    """The verbs over a socket: a request and an answer of msgpack on each connection."""
    import msgspec

    from actors.buffer.actor import BufferActor, LeasedBatch
    from service.files import write_atomic
    from service.handoff.verbs import Claim
    from service.types import PolicyVersion, TrajectoryId

    config = settings(folder)
    words = (config.model_dump_json(), 1000, str(folder / "train.jsonl"), str(folder / "journal"), NoHub())
    buffer = BufferActor(*words)
    await buffer.ready()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        method, arguments = msgspec.msgpack.decode(
            await reader.readexactly(int.from_bytes(await reader.readexactly(8)))
        )
        if method == "claim":
            arguments[0] = msgspec.convert(arguments[0], Claim)
        if method == "renew":
            arguments[2] = msgspec.convert(arguments[2], list[TrajectoryId])
        found = await getattr(buffer, method)(*arguments)
        said = msgspec.msgpack.encode([type(found).__name__, found])
        writer.write(len(said).to_bytes(8) + said)
        writer.close()

    Path(address(folder)).unlink(missing_ok=True)
    server = await asyncio.start_unix_server(answer, address(folder))
    incarnation = await buffer.join("trainer", "trainer")
    async with server:
        step = buffer._buffer.version
        write_atomic(folder / "version.json", json.dumps(step))
        while True:
            leased = await buffer.lease(incarnation, 1.0)
            if isinstance(leased, LeasedBatch):
                step = PolicyVersion(incarnation, step.step + 1)
                if await buffer.commit(incarnation, leased.lease, step) is None:
                    write_atomic(folder / "version.json", json.dumps(step))


class Far:
    """The buffer of another process, in the form of an actor's handle."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *arguments: self._ask(method, arguments))

    async def _ask(self, method: str, arguments: tuple[Any, ...]) -> Any:
        import msgspec

        from actors.generator.outbox import Unreachable
        from service.handoff.verbs import Assignment, Receipt, Wait
        from service.types import Refusal

        kinds: dict[str, Any] = {kind.__name__: kind for kind in (Assignment, Receipt, Wait, Refusal)}
        kinds |= {"tuple": tuple[Assignment, ...], "list": list[Assignment], "int": int, "NoneType": type(None)}
        asked = msgspec.msgpack.encode([method, arguments])
        try:
            reader, writer = await asyncio.open_unix_connection(address(self._folder))
            writer.write(len(asked).to_bytes(8) + asked)
            said = await reader.readexactly(int.from_bytes(await reader.readexactly(8)))
            writer.close()
        except (OSError, EOFError) as error:
            raise Unreachable(str(error)) from error
        kind, found = msgspec.msgpack.decode(said)
        return msgspec.convert(found, kinds[kind])


async def generate(folder: Path) -> None:
    """One life of the generator."""
    from actors.engine.run_player import RunPlayer
    from actors.generator.actor import Generator
    from service.rollout.chat.chat import load_chat
    from service.types import PolicyVersion
    from tests.pure.rollout.conftest import ScriptedEngine

    config = settings(folder)
    say, vocabulary = random.Random(os.urandom(8)), json.loads((folder / "words.json").read_text())

    class Engine(ScriptedEngine):
        running, load = 0, None
        counts: ClassVar = {"cached_tokens": 0, "generated_tokens": 0}

        @property
        def serving(self) -> PolicyVersion:
            return PolicyVersion(*json.loads((folder / "version.json").read_text()))

        async def check(self, deadline: float) -> None:
            pass

        async def generate(self, *asked: Any) -> Any:
            serving = self.serving
            await asyncio.sleep(say.uniform(0.01, 0.1))
            made = await super().generate(*asked)
            made.versions[:] = serving.pack()
            return made

    words = (config.model_dump_json(), str(folder), str(folder / "train.jsonl"), Far(folder), NoHub(), secret(), 0)
    made = Generator("generator-0", *words)
    chat = load_chat(folder, config.generator)
    engine = Engine(chat, lambda prompt: " ".join(say.choices(vocabulary, k=WORDS)))
    made._engine = engine  # type: ignore[assignment]
    made._player = RunPlayer(config, folder, engine, secret(), 0)
    made._joined = await made._join()
    made._unfinished = await made._taken_over(made._joined)
    await made.run()


def main() -> None:
    role, folder = sys.argv[1], Path(sys.argv[2])
    if role in ("agent", "worker"):
        return agent(folder) if role == "agent" else work(folder)
    (folder / "pids").mkdir(exist_ok=True)
    (folder / "pids" / role).write_text(str(os.getpid()))
    asyncio.run(serve_buffer(folder) if role == "buffer" else generate(folder))


if __name__ == "__main__":
    main()
