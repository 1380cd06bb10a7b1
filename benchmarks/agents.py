"""What the endpoint for agents adds to the policy's own time: `python -m benchmarks.agents`.

    clients (a process) --HTTP--> endpoint, engine that sleeps (this one) --Ray--> buffer with its journal (an actor)

Each call of a client is timed from its first byte to its last one, and the engine's sleep is subtracted. For the
figures of the endpoint alone the wait until the buffer has the step on its disk is subtracted too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import defaultdict
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from actors.engine.run_player import RunPlayer
from benchmarks.own_environment import own_ray
from service.config import Config, load_config
from service.handoff.verbs import Claim
from service.rollout.chat.chat import Chat
from service.rollout.engine import Generation, Sampling
from service.rollout.environment import AgentSession, Task
from service.rollout.prompts.dataset import load_tasks
from service.rollout.prompts.rows import write_rows
from service.types import Int32s, PolicyVersion, TrajectoryId

NAME = "benchmarks.agents"
"""The name of this module, which also runs as `__main__`."""
TURNS, OPENING_CHARACTERS, RESULT_CHARACTERS = 24, 16_000, 2000
"""A session: the number of its calls, and the characters of its first request and of the tool result after each call;
about 20,000 tokens."""
SESSIONS, SAMPLES = 64, 8
"""Sessions at once, and trajectories of a group."""
SECONDS_PER_TOKEN = 0.02
TEXT = "\n".join(path.read_text(encoding="utf-8") for path in sorted(Path("service").rglob("*.py")))
TEMPLATE = """\
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


class Sleeper:
    """An engine that returns random tokens, after sleeping for `SECONDS_PER_TOKEN` each."""

    def __init__(self, end_id: int) -> None:
        self._end_id = end_id
        self.version = PolicyVersion(0, 0)
        """The policy version with which the tokens are labelled."""

    async def generate(self, prompt_ids: Int32s, sampling: Sampling, request_id: str) -> Generation:
        """Sleep, then return 16 to 127 random tokens, seeded by the end of the prompt; the last one is the end
        token."""
        drawn = np.random.default_rng(prompt_ids[-64:].astype(np.uint32))
        n = int(drawn.integers(16, 128))
        token_ids = drawn.integers(300, 4000, n).astype(np.int32)
        token_ids[-1] = self._end_id
        await asyncio.sleep(SECONDS_PER_TOKEN * n)
        versions = np.full(n, self.version.pack(), np.int64)
        return Generation(token_ids, np.full(n, -0.5, np.float32), versions, "stop", sampled_end=True)


class Outside:
    """An agent whose calls are made by the clients' process."""

    clients: Clients

    async def play(self, session: AgentSession, task: Task, seed: int) -> None:
        """Have a conversation."""
        self.clients.keys[str(session.trajectory)] = session.key  # type: ignore[attr-defined]
        await self.clients.play(session.base_url, session.key, seed)
        session.finish(1.0)


class Clients:
    """The process that plays conversations, and the times that it measured."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._waiting: dict[str, asyncio.Future[None]] = {}
        self.keys: dict[str, str] = {}
        """The key of each session, by its trajectory."""
        self.seconds: dict[str, list[float]] = {}
        """The seconds of each session's calls, by the session's key."""

    async def play(self, base_url: str, key: str, seed: int) -> None:
        """Let the process have one conversation; returns when it has ended."""
        waiting = self._waiting[key] = asyncio.get_running_loop().create_future()
        self._process.stdin.write(json.dumps([base_url, key, seed]).encode() + b"\n")  # type: ignore[union-attr]
        await waiting

    async def listen(self) -> None:
        """Read the times that the process prints."""
        while line := await self._process.stdout.readline():  # type: ignore[union-attr]
            key, seconds = json.loads(line)
            self.seconds[key] = seconds
            self._waiting.pop(key).set_result(None)


async def be_clients() -> None:
    """The clients' process: have a conversation for each line of stdin."""
    import aiohttp

    loop, lines = asyncio.get_running_loop(), asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http, asyncio.TaskGroup() as talks:
        while line := await lines.readline():
            talks.create_task(converse(http, *json.loads(line)))


async def converse(http: Any, base_url: str, key: str, seed: int) -> None:
    """Have one conversation; prints the seconds of each call, less those of the engine."""
    drawn, seconds, headers = random.Random(f"{key}{seed}"), [], {"Authorization": f"Bearer {key}"}
    await asyncio.sleep(drawn.random() * SECONDS_PER_TOKEN * 128)
    messages = [{"role": "user", "content": excerpt(drawn, OPENING_CHARACTERS)}]
    for _ in range(TURNS):
        body = json.dumps({"model": "policy", "messages": messages}).encode()
        began = time.perf_counter()
        async with http.post(f"{base_url}/chat/completions", data=body, headers=headers) as answer:
            raw = await answer.read()
        took = time.perf_counter() - began
        reply = json.loads(raw)
        seconds.append(took - SECONDS_PER_TOKEN * reply["usage"]["completion_tokens"])
        messages += [reply["choices"][0]["message"], {"role": "user", "content": excerpt(drawn, RESULT_CHARACTERS)}]
    print(json.dumps([key, seconds]), flush=True)


def excerpt(drawn: random.Random, n: int) -> str:
    """`n` characters of this project's code."""
    at = drawn.randrange(len(TEXT) - n)
    return TEXT[at : at + n]


def make_tokenizer(folder: Path) -> None:
    """Write a byte-level tokenizer of 8,000 tokens, built like those of large models."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=8000, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(TEXT.splitlines(), trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=made,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=TEMPLATE,
        additional_special_tokens=special[:1],
    ).save_pretrained(folder)


def configuration(folder: Path) -> Config:
    """A configuration in which all sessions are one mini-batch."""
    words = [f"run.dir={folder}", f"env.name={NAME}:Outside", f"env.trusted_modules=[{NAME}]", "metrics.port=0"]
    words += [f"agents.max_tokens={1 << 17}", f"generator.max_input_length={1 << 17}"]
    words += ["generator.max_generate_length=129", "buffer.lookahead=0", "buffer.merge=tree", "trainer.ranks=1"]
    words += [f"algorithm.n_samples_per_prompt={SAMPLES}", f"trainer.mini_batch_size={SESSIONS // SAMPLES}"]
    return load_config([], [*words, f"trainer.max_tokens_per_micro_batch={1 << 20}"])


async def latency(folder: Path, rounds: int) -> dict[str, float]:
    """Seconds of a call without the engine's sleep, with the buffer's actor and its journal."""
    import ray

    from actors.buffer.actor import BufferActor
    from actors.calls import call
    from actors.generator.outbox import Outbox
    from actors.observe.metrics_hub import MetricsHub

    accepting = defaultdict[str, list[float]](list)

    class TimedOutbox(Outbox):
        async def accepted(self, trajectory: TrajectoryId) -> bool:
            began = time.perf_counter()
            is_accepted = await super().accepted(trajectory)
            accepting[str(trajectory)].append(time.perf_counter() - began)
            return is_accepted

    folder.mkdir()
    config, model = configuration(folder / "run"), folder / "model"
    make_tokenizer(model)
    rows = [{"uid": str(i), "prompt": [{"role": "user", "content": "x"}]} for i in range(512)]
    write_rows(folder / "rows.jsonl", rows)
    tasks = load_tasks(folder / "rows.jsonl")
    config_json = config.model_dump_json()
    hub = ray.remote(MetricsHub).options(num_cpus=0).remote(config_json)
    actor: Any = ray.remote(BufferActor).options(num_cpus=0, max_concurrency=1000)
    buffer = actor.remote(config_json, 8000, str(folder / "rows.jsonl"), str(folder / "journal"), hub)
    ask = partial(call, who="the buffer")
    incarnation = await ask(buffer.join, "generator", "g")
    trainer = await ask(buffer.join, "trainer", "trainer")
    outbox = TimedOutbox("g", incarnation, partial(ask, buffer.submit), 60.0, lambda _: None, lambda _: None)
    command = (sys.executable, "-m", NAME, "--clients")
    process = await asyncio.create_subprocess_exec(*command, stdin=-1, stdout=-1, limit=1 << 24)
    clients = import_module(NAME).Outside.clients = Clients(process)
    background = [asyncio.create_task(outbox.run()), asyncio.create_task(clients.listen())]
    engine = Sleeper(Chat(PreTrainedTokenizerFast.from_pretrained(model)).end_id)
    player = RunPlayer(config, model, engine)
    for i in range(rounds):
        groups = []
        for _ in range(SESSIONS // SAMPLES):
            group = await ask(buffer.claim, Claim("g", incarnation, engine.version), 10.0)
            if not isinstance(group, list):
                raise RuntimeError(f"no group: {group}")
            groups += group
        trajectories = [
            player.play(TrajectoryId(group.group_id, sample, attempt), tasks[group.row], outbox)
            for group in groups
            for sample, attempt in zip(group.samples, group.attempts, strict=True)
        ]
        ends = await asyncio.gather(*trajectories)
        if {(end.stop_reason, end.n_steps) for end in ends} != {("stop", TURNS)}:
            raise RuntimeError(f"trajectories failed: {player.failures}")
        await outbox.flush()
        leased = await ask(buffer.lease, trainer, 60.0)
        engine.version = PolicyVersion(trainer, i + 1)
        await ask(buffer.commit, trainer, leased.lease, engine.version)
    process.stdin.close()  # type: ignore[union-attr]
    for task in background:
        task.cancel()
    await process.wait()
    await player.close()
    pairs = [
        pair
        for trajectory, key in clients.keys.items()
        for pair in zip(clients.seconds[key], accepting[trajectory], strict=False)
    ]  # the buffer's last answer is about the trajectory's end
    seconds, until_accepted = np.array(pairs).T
    columns = {"": seconds, "until_accepted_": until_accepted, "endpoint_": seconds - until_accepted}
    cuts = {f"{name}p{cut}_ms": float(np.percentile(of, cut) * 1e3) for name, of in columns.items() for cut in (50, 99)}
    return {"sessions": SESSIONS, "calls": len(seconds), **cuts}


def main() -> None:
    """Measure, and print JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.agents", description=__doc__)
    parser.add_argument("--clients", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=2, help="times that 64 sessions are played")
    arguments = parser.parse_args()
    if arguments.clients:
        asyncio.run(be_clients())
        return
    with tempfile.TemporaryDirectory(prefix="baton-", ignore_cleanup_errors=True) as folder, own_ray(folder):
        figures = asyncio.run(latency(Path(folder) / "run", arguments.rounds))
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
