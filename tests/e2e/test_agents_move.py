"""Sessions of agents whose generators and gateway are killed in a real run."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import ray
from openai import OpenAI

from actors.engine.run_player import RunPlayer
from actors.engine.vllm_engine import VllmEngine, engine_env
from baton.examples.lookup import vocabulary
from service.agents.gateway import Gateway
from service.agents.sessions import session_key
from service.clock import SystemClock
from service.config import load_config
from service.handoff.journal.journal import Journal
from service.handoff.ledger import events
from service.handoff.ledger.replaying import message_of
from service.handoff.steps.tables import step_objects
from service.rollout.chat.chat import Chat
from service.rollout.chat.tokenizer import load_tokenizer
from service.rollout.environment import Message, Task
from service.rollout.run_secret import RunSecret
from service.rollout.step_sinks import StepColumns
from service.run.preparing.inputs import make_policy
from service.types import PolicyVersion, TrajectoryId
from tests.e2e.conftest import QUICK, ROOT, Drive, Driver

pytestmark = pytest.mark.slow

TURNS = 4
PAUSE = 0.3
NOTICED_SECONDS = 20.0
"""From the death of a generator to the line about it; there is none about one that had just begun to start."""
KILLS = int(os.environ.get("BATON_KILLS", "100"))

RECIPE = ROOT / "configs" / "quickstart.yaml"
SECRET, SESSIONS, CALLS, WORDS = RunSecret(b"a test"), 24, 8, 40
AGENT = ["env.name=agent", "env.command=[python]", "agents.max_tokens=65536", "generator.max_input_length=1024"]


class Work:
    """Plays every session that it finds, as a service elsewhere does."""

    def __init__(self, folder: Path, turns: int = TURNS, pause: float = PAUSE) -> None:
        self.folder, self.turns, self.pause = folder, turns, pause
        folder.mkdir()
        self.failures, self.ended = list[str](), list[str]()
        self.said: dict[str, list[str]] = defaultdict(list)
        """What the policy answered, by the name of the session."""
        self._known: set[str] = set()
        self.is_over = False
        threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        while not self.is_over:
            for file in self.folder.glob("[!.]*.json"):
                if file.stem not in self._known:
                    self._known.add(file.stem)
                    threading.Thread(target=self._play, args=(file,), daemon=True).start()
            time.sleep(0.1)

    def _play(self, file: Path) -> None:
        job, said = json.loads(file.read_text()), self.said[file.stem]
        messages: list[Any] = [{"role": "user", "content": job["question"]}]
        try:
            with OpenAI(base_url=job["base_url"], api_key=job["key"], max_retries=10) as client:
                for _ in range(self.turns):
                    message = client.chat.completions.create(model="policy", messages=messages).choices[0].message
                    said.append(message.content or "")
                    messages += [message.model_dump(exclude_none=True), {"role": "user", "content": job["question"]}]
                    time.sleep(self.pause)
                end = {"reward": float(random.Random(file.stem).random() > 0.5), "transcript": json.dumps(said)}
                client.post(f"{job['base_url'].partition('/s/')[0]}/rl/sessions/x/finish", body=end, cast_to=object)
            self.ended.append(file.stem)
        except Exception as error:  # noqa: BLE001 - said by the test
            if not self.is_over:
                self.failures.append(f"{file.stem}: {error!r}")


def test_sessions_go_on_in_another_generator_when_theirs_and_the_gateway_are_killed(
    drive: Drive, tmp_path: Path
) -> None:
    work = Work(folder := tmp_path / "jobs")
    steps = ["run.max_steps=3", "trainer.mini_batch_size=2", "agents.end_grace=120"]
    run = drive([*QUICK, *settings(folder), "generator.engines=2", "generator.max_input_length=256", *steps])
    run.until_true(lambda: len(work.ended) >= 2, "a session that has ended")
    run.kill_part("ray::Generator")
    run.until_true(lambda: list(folder.glob("resumed/*")), "a session that has moved")
    run.kill_part("ray::GatewayActor")
    run.finish()
    assert not work.failures and "sessions_cut" not in run.summary()
    work.is_over = True
    assert all(name.endswith("-0") for name in work.ended), "an attempt was replaced"


@pytest.mark.full
@pytest.mark.timeout(5400)
def test_generators_killed_again_and_again_lose_no_session_and_change_no_acknowledged_token(
    drive: Drive, tmp_path: Path
) -> None:
    """The engines are scripted; the processes and the journal are real."""
    work = Work(folder := tmp_path / "jobs", turns=12, pause=1.0)
    long = ["generator.max_input_length=1024", "generator.max_generate_length=16", "agents.max_calls=16"]
    endless = ["run.max_steps=100000", "run.max_restarts=100000", "trainer.mini_batch_size=2", "weights.verify=false"]
    three = ["generator.engines=3", "model.warm_start=null", "metrics.port=0"]
    run = drive([*settings(folder), *three, *long, *endless], PYTHONPATH=f"{ROOT / 'tests/e2e/scripted_engine'}:{ROOT}")
    run.until_true(lambda: len(work.said) > 8, "sessions")
    for _ in range(KILLS):  # one of the two that have run longest, as soon as at most one is down
        run.until_true(lambda: len(down(run)) < 2, "a generator that is up")
        known, late = failures(run), time.monotonic() + NOTICED_SECONDS
        run.kill_part("ray::Generator", chosen=lambda mine: random.choice(sorted(mine)[:2]))
        run.until_true(lambda: failures(run) > known or time.monotonic() > late)  # noqa: B023 - called here
    run.until_true(lambda: not down(run), "the last ones")
    work.is_over = True
    assert not work.failures
    assert all(name.endswith("-0") for name in work.said), "an attempt was replaced"
    run.stop()
    print(f"{KILLS} kills, {len(work.said)} sessions, of which {len(list(folder.glob('resumed/*')))} moved,", end=" ")
    chat = Chat(load_tokenizer(run.folder / "model"))
    journalled: dict[str, list[str]] = defaultdict(list)
    for frame in Journal(run.folder / "journal", SystemClock()).replay():
        for step in step_objects(message_of(frame).steps) if frame.kind == events.STEPS else ():
            name = "-".join(map(str, step.trajectory))
            assert step.index == len(journalled[name]), "a step is journalled twice, or not in order"
            journalled[name].append(chat.text(step.response_ids[step.loss_mask][:-1]))
    said = {name: list(texts) for name, texts in work.said.items()}
    print(f"{sum(map(len, said.values()))} acknowledged answers")
    assert all(journalled[name][: len(texts)] == texts for name, texts in said.items())


class Serving:
    """An engine, and the endpoint of its agents' sessions."""

    async def start(self, folder: Path, sessions: list[TrajectoryId]) -> str:
        config = load_config([RECIPE], AGENT)
        self.engine = VllmEngine(config, folder)
        await self.engine.start(PolicyVersion(1, 0))
        agents: Any = RunPlayer(config, folder, self.engine, SECRET).agents
        for session in sessions:
            agents.session(session, Task("p", (Message(role="user", content=""),), "agent"), StepColumns())
        await agents.listen()
        return str(agents.address)

    async def cached(self) -> int:
        return self.engine.cached_tokens


async def talk(http: aiohttp.ClientSession, url: str, session: str) -> int:
    """The tokens of the prompts of one session's calls."""
    drawn, headers = random.Random(session), {"Authorization": f"Bearer {session_key(SECRET, session)}"}
    messages, tokens = list[dict[str, Any]](), 0
    for _ in range(CALLS):
        messages.append({"role": "user", "content": " ".join(drawn.choices(vocabulary(), k=WORDS))})
        body = {"model": "policy", "messages": messages}
        async with http.post(f"{url}/v1/chat/completions", json=body, headers=headers) as answer:
            reply = await answer.json()
            assert answer.status == 200, reply
        messages.append(reply["choices"][0]["message"])
        tokens += reply["usage"]["prompt_tokens"]
        await asyncio.sleep(0.2)
    return tokens


@pytest.mark.full
def test_sessions_find_as_much_of_their_prompts_in_the_cache_through_the_gateway_as_at_their_own_generator(
    local_ray: None, tmp_path: Path
) -> None:
    config = load_config([RECIPE])
    make_policy(config.model, config.env, 0, tmp_path / "model")
    options: Any = {"max_concurrency": 100, "runtime_env": {"env_vars": engine_env(config.generator)}}
    generators = [ray.remote(Serving).options(**options).remote() for _ in range(2)]
    sessions = [TrajectoryId(way, number) for way in range(2) for number in range(SESSIONS)]
    addresses = ray.get([g.start.remote(tmp_path / "model", sessions[k::2]) for k, g in enumerate(generators)])

    def cached() -> int:
        return sum(ray.get([each.cached.remote() for each in generators]))

    async def continues(of: TrajectoryId) -> bool:
        return True

    async def shares() -> list[float]:
        gateway, found = Gateway(SECRET, continues, 600.0), list[float]()
        through = await gateway.start("127.0.0.1", 0)
        for number, address in enumerate(addresses):
            gateway.serves(str(number), address)
        async with aiohttp.ClientSession() as http:
            for way, urls in enumerate(([through] * 2, addresses)):
                before, named = cached(), [f"{way}-{number}-0" for number in range(SESSIONS)]
                tokens = await asyncio.gather(*(talk(http, urls[n % 2], name) for n, name in enumerate(named)))
                found.append((cached() - before) / sum(tokens))
        await gateway.stop()
        return found

    through, pinned = asyncio.run(shares())
    print(f"prompt tokens found in the cache: {through:.4f} through the gateway, {pinned:.4f} pinned")
    for each in generators:
        ray.kill(each)
    assert through >= 0.9 * pinned > 0.5


def failures(run: Driver) -> int:
    """How many failures of generators the run has told."""
    return len(re.findall(r"generator-\d failed \(", "".join(run.said)))


def down(run: Driver) -> set[str]:
    """The generators that have failed and are not back."""
    last = dict(re.findall(r"(generator-\d) (failed|is back)", "".join(run.said)))
    return {name for name, what in last.items() if what == "failed"}


def settings(folder: Path) -> list[str]:
    """Those of a run whose agents work in the process of the test."""
    return [
        "generator.concurrent_groups=4",
        "algorithm.n_samples_per_prompt=4",
        "trainer.ranks=1",
        "env.name=tests.e2e.elsewhere:Elsewhere",
        "env.trusted_modules=[tests.e2e.elsewhere]",
        f"env.options={{folder: {folder}}}",
        "agents.max_calls=8",
        "buffer.merge=tree",
    ]
