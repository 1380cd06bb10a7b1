"""Sessions that an agent hands on to work elsewhere, which finishes them; they outlive their generator's process."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import stat
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import TestServer

from actors.driver import run as running
from actors.engine.run_player import RunPlayer
from service.agents import sessions
from service.agents.session import Session
from service.agents.sessions import Sessions, session_key
from service.config import AgentsConfig, Config
from service.config.rollout import EnvConfig, GeneratorConfig
from service.errors import UserError
from service.handoff.prefixes.merge import merge_steps
from service.handoff.steps.tables import step_objects, steps_table
from service.handoff.steps.values import MAX_REWARD, NEEDED
from service.rollout.chat.chat import Chat
from service.rollout.chat.tokenizer import load_tokenizer
from service.rollout.engine import Generation
from service.rollout.environment import AgentSession, Task
from service.rollout.run_secret import SECRET_FILE, RunSecret, run_secret
from service.rollout.step_sinks import StepColumns
from service.run.records.writer import RunWriter
from service.types import TrajectoryEnd, TrajectoryId
from tests.pure.agents.endpoint import CHAT, whole
from tests.pure.rollout.conftest import VERSION, ScriptedEngine
from tests.pure.rollout.test_agent import optimal

SECRET = RunSecret(b"secret of this run")
OF = TrajectoryId(5, 1)
RECIPES = Path(__file__).parents[3] / "docs" / "agent-recipes.md"
HERE = __name__


class Handed(NamedTuple):
    """What an agent hands on."""

    session: AgentSession
    task: Task
    method: str


class HandsOn:
    """An agent that only starts work elsewhere."""

    handed: ClassVar[dict[str, Handed]] = {}
    """What was handed on, by the name of the session."""

    def __init__(self, silence: float) -> None:
        self.silence = silence

    async def play(self, session: AgentSession, task: Task, seed: int, method: str = "play") -> None:
        self.handed[session.base_url.split("/")[-2]] = Handed(session, task, method)
        await session.until_finished(self.silence)

    async def resume(self, session: AgentSession, task: Task, seed: int) -> None:
        await self.play(session, task, seed, "resume")


class Columns(StepColumns):
    """A buffer that answers when it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.accepts = True
        self.answers = asyncio.Event()
        self.answers.set()

    async def accepted(self, trajectory: TrajectoryId) -> bool:
        await self.answers.wait()
        return self.accepts


class Served:
    """A generator whose agents hand on their sessions."""

    def __init__(self, model: Path, secret: RunSecret = SECRET, silence: float = 60.0, **agents: Any) -> None:
        self.config = Config(
            env=EnvConfig(name=f"{HERE}:HandsOn", trusted_modules=(HERE,), options={"silence": silence}),
            agents=AgentsConfig(**agents),
            generator=GeneratorConfig(max_input_length=128, max_generate_length=8),
        )
        self.secret = secret
        self.engine = ScriptedEngine(Chat(load_tokenizer(model)), optimal)
        self.player = RunPlayer(self.config, model, self.engine, secret)
        self.sink = Columns()
        self.http = aiohttp.ClientSession()
        HandsOn.handed.clear()

    def play(self, task: Task, of: TrajectoryId = OF) -> asyncio.Task[TrajectoryEnd]:
        return asyncio.create_task(self.player.play(of, task, self.sink))

    @property
    def agents(self) -> Any:
        return self.player.agents

    async def post(self, path: str, body: Any = None, key: str = "", session: str = "5-1-0") -> tuple[int, Any]:
        """POST with a key, by default that of the session."""
        headers = {"Authorization": f"Bearer {key or session_key(self.secret, session)}"}
        await self.agents.listen()
        async with self.http.post(self.agents.address + path, json=body or {}, headers=headers) as answer:
            text = await answer.text()
            return answer.status, json.loads(text) if text else None

    async def handed(self, session: str = "5-1-0") -> Handed:
        async with asyncio.timeout(30):
            while session not in HandsOn.handed:
                await asyncio.sleep(0.005)
        return HandsOn.handed[session]

    async def aclose(self) -> None:
        await self.http.close()
        await self.player.close()


@pytest_asyncio.fixture(loop_scope="function")
async def served(model: Path) -> AsyncIterator[Served]:
    async with aclosing(Served(model)) as made:
        yield made


FINISH = "/rl/sessions/any/finish"


def asked(task: Task) -> dict[str, Any]:
    return {"model": "m", "messages": [dict(message) for message in task.prompt]}


async def test_what_an_agent_hands_on_suffices_to_play_and_finish_its_session(
    served: Served, tasks: list[Task]
) -> None:
    playing = served.play(tasks[0])
    session, task, method = await served.handed()
    assert (session.base_url, method) == (f"{served.agents.address}/s/5-1-0/v1", "play")
    assert session.key == session_key(SECRET, "5-1-0") and task.uid == tasks[0].uid
    assert (await served.post("/s/5-1-0" + CHAT, asked(tasks[0]), session.key))[0] == 200
    async with served.http.get(f"{served.agents.address}/rl/sessions/5-1-0", headers={"x-api-key": session.key}) as got:
        assert await got.json() == {"session": "5-1-0", "state": "open", "calls": 1}
    assert (await served.post(FINISH, {"reward": 1.0, "info": {"turns": 2}}))[0] == 200
    end = await playing
    assert (end.reward, end.n_steps) == (1.0, 1)


async def test_the_key_decides_which_session_is_managed(served: Served, tasks: list[Task]) -> None:
    one, other = served.play(tasks[0]), served.play(tasks[1], TrajectoryId(6, 0))
    await asyncio.gather(served.handed(), served.handed("6-0-0"))
    for verb in ("reward", "finish"):
        assert (await served.post(f"/rl/sessions/5-1-0/{verb}", key="wrong"))[0] == 401
        assert (await served.post(f"/rl/sessions/6-0-0/{verb}", {"reward": 0.5}))[0] == 200
    assert (await one).reward == 0.5 and not other.done()
    other.cancel()


async def test_a_finish_is_answered_once_the_buffer_has_the_end_and_a_repetition_changes_nothing_even_after_a_restart(
    model: Path, tasks: list[Task], tmp_path: Path
) -> None:
    secret = RunSecret(SECRET.value, tmp_path)
    async with aclosing(Served(model, secret)) as served:
        playing = served.play(tasks[0])
        await served.handed()
        served.sink.answers.clear()
        said = {"reward": 0.25, "status": "ok", "reason": "", "info": {}, "transcript": "hello"}
        finishing = [asyncio.create_task(served.post(FINISH, said)) for _ in range(2)]
        while not served.sink.ends:
            await asyncio.sleep(0.01)
        async with asyncio.timeout(30):  # it does not wait for the buffer
            assert (await served.post(FINISH, {"reward": 1.0}))[0] == 409
        assert (await served.post("/s/5-1-0" + CHAT, asked(tasks[0])))[0] == 409
        assert not any(finish.done() for finish in finishing)
        async with aclosing(Served(model, secret)) as after_a_kill:  # the buffer gave the trajectory up meanwhile
            assert (await after_a_kill.post(FINISH, said))[0] == 401
        served.sink.answers.set()
        assert [await finish for finish in finishing] == [(200, {})] * 2
        assert (await playing).reward == 0.25
        assert [(await served.post(FINISH, body))[0] for body in (said, {"reward": 1.0})] == [200, 409]
    async with aclosing(Served(model, secret)) as restarted:
        assert [(await restarted.post(FINISH, body))[0] for body in (said, {"reward": 1.0})] == [200, 409]
        assert (await restarted.post(FINISH, said, "wrong"))[0] == 401
        again = restarted.play(tasks[0])  # the buffer had no end of it: it is open, whatever was noted
        await restarted.handed()
        assert (await restarted.post(FINISH, {"reward": 1.0}))[0] == 200
        assert (await again).reward == 1.0


async def test_a_finish_says_what_the_buffer_said(served: Served, tasks: list[Task]) -> None:
    served.sink.accepts = False
    refused, abandoned = served.play(tasks[0]), served.play(tasks[1], TrajectoryId(6, 0))
    await asyncio.gather(served.handed(), served.handed("6-0-0"))
    for _ in range(2):
        assert (await served.post(FINISH, {"reward": 1.0}))[0] == 409
        await refused
    served.sink.answers.clear()
    finishing = asyncio.create_task(served.post(FINISH, {"reward": 1.0}, session="6-0-0"))
    while len(served.sink.ends) < 2:
        await asyncio.sleep(0.01)
    abandoned.cancel()
    assert (await finishing)[0] == 503
    with suppress(asyncio.CancelledError):
        await abandoned
    assert (await served.post(FINISH, {"reward": 1.0}, session="6-0-0"))[0] == 409


def test_the_file_of_ended_sessions_holds_the_newest_ones_and_stays_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "MAX_ENDED", 4)
    file = tmp_path / "ended"
    noted = Sessions(file)
    for number in range(30):
        noted.finished(SimpleNamespace(name=f"s{number}", key=f"key{number}"), f"body{number}")  # type: ignore[arg-type]
        assert len(file.read_text().splitlines()) <= 8
    again = Sessions(file)
    found = [again.finished_with(f"key{number}") for number in range(30)]
    assert found == [""] * 26 + [f"body{number}" for number in range(26, 30)]


async def test_a_reward_that_the_buffer_would_refuse_is_refused_at_finish_and_the_session_goes_on(
    served: Served, tasks: list[Task]
) -> None:
    playing = served.play(tasks[0])
    await served.handed()
    assert (await served.post("/s/5-1-0" + CHAT, asked(tasks[0])))[0] == 200
    for body, field in (
        ({"reward": 2 * MAX_REWARD}, "reward"),
        ({"reward": 0.5, "rewards": {"main": -2 * MAX_REWARD}}, "rewards"),
        ({"reward": MAX_REWARD, "rewards": {"main": MAX_REWARD}}, "rewards"),
        ({"reward": 0.5, "rewards": {"nobody": 1.0}}, "rewards"),
    ):
        status, answer = await served.post(FINISH, body)
        assert (status, answer["error"]["param"]) == (400, field)
        assert NEEDED in answer["error"]["message"] or "nobody" in answer["error"]["message"]
    assert (await served.post(FINISH, {"reward": MAX_REWARD}))[0] == 200
    assert (await playing).reward == MAX_REWARD


async def test_what_the_endpoint_refused_stands_in_the_log_and_in_the_reason_of_a_lost_trajectory(
    model: Path, tasks: list[Task], caplog: pytest.LogCaptureFixture
) -> None:
    async with aclosing(Served(model)) as served:
        playing = served.play(tasks[0])
        await served.handed()
        served.http.headers["User-Agent"] = "OpenAI/Python 2.1"
        for _ in range(3):
            assert (await served.post(CHAT, {"model": "m", "messages": 7}))[0] == 400
        failed = {"status": "failed", "reason": "its exit code was 1", "transcript": "400!\n", "exit_code": 1}
        assert (await served.post(FINISH, failed))[0] == 200
        await playing
    (failure,) = served.player.failures.values()
    why = "400 messages: Expected `array`, got `int` (client OpenAI/Python 2.1)"
    assert failure.endswith(f": its exit code was 1\n    400!\n    refused 3 times: {why}")
    assert caplog.text.count(f"a request of session 5-1-0 is refused: {why}") == 1


def kept() -> int:
    """Sessions of which something holds on to."""
    gc.collect()
    return sum(type(thing) is Session for thing in gc.get_objects())


@pytest.mark.parametrize(
    ("fault", "reason"),
    [("silent", "environment_error"), ("late", "environment_timeout"), ("failed", "environment_error")],
)
async def test_a_session_without_an_end_is_lost_and_its_trajectory_attempted_again(
    model: Path, tasks: list[Task], fault: str, reason: str
) -> None:
    deadlines = {"silent": {"silence": 0.2}, "late": {"deadline": 0.4}, "failed": {}}[fault]
    async with aclosing(Served(model, **deadlines)) as served:
        before = kept()
        playing = served.play(tasks[0])
        await served.handed()
        if fault == "failed":
            await served.post(FINISH, {"status": "failed", "reason": "no disk"})
        assert (await playing).stop_reason == reason
        assert fault != "silent" or "no request of session 5-1-0 came for 0.2 s" in str(served.player.failures)
        HandsOn.handed.clear()
        assert len(served.agents.sessions) == 0 and (fault != "silent" or kept() <= before)


async def test_a_session_outlives_its_generators_process(model: Path, tasks: list[Task]) -> None:
    path = "/s/5-1-0" + CHAT
    async with aclosing(Served(model)) as served:
        served.play(tasks[0])
        await served.handed()
        _, first = await served.post(path, asked(tasks[0]))
        steps = steps_table(step_objects(served.sink.steps()))
    async with aclosing(Served(model)) as again:
        sampled, told = again.engine.generate, list[tuple[list[TrajectoryId], int]]()

        async def sample(*arguments: Any) -> Generation:
            generation = await sampled(*arguments)
            return replace(generation, versions=generation.versions + 1)

        async def tell(calling: list[TrajectoryId]) -> bool:
            told.append((calling, len(again.engine.prompts)))
            return len(told) == 2

        again.engine.generate, again.agents.calls_again = sample, tell  # type: ignore[method-assign]
        assert again.player.resumes and again.player.restore(OF, tasks[0], steps, again.sink)
        playing = again.play(tasks[0])
        assert (await again.handed()).method == "resume"
        _, repeated = await again.post(path, asked(tasks[0]))
        assert repeated["choices"] == first["choices"] and not len(again.sink) and not told
        body, reply = asked(tasks[0]), first
        for _ in range(3):
            body["messages"] += [reply["choices"][0]["message"], {"role": "user", "content": "none"}]
            status, reply = await again.post(path, body)
            assert status == 200
        assert (await again.post(FINISH, {"reward": 1.0}))[0] == 200
        assert (await playing).n_steps == 4 and told == [([OF], 0), ([OF], 1)]  # once more, as it was not told
        both = [*step_objects(steps), *step_objects(again.sink.steps())]
        assert [step.index for step in both] == [0, 1, 2, 3]
        whole(both)  # the references hold
        (row,) = merge_steps(both)
        sampled_by = [VERSION + (step.index > 0) for step in both for _ in range(step.loss_mask.sum())]
        assert row.versions[row.loss_mask].tolist() == sampled_by


async def test_the_deadline_of_an_agent_is_that_of_its_session_in_all_generators(
    model: Path, tasks: list[Task]
) -> None:
    async with aclosing(Served(model)) as served:
        served.play(tasks[0])
        await served.handed()
        served.agents.sessions.open()[0].began -= 3600
        await served.post(CHAT, asked(tasks[0]))
        steps = steps_table(step_objects(served.sink.steps()))
    for deadline, is_over in ((3600.0, True), (7200.0, False)):
        async with aclosing(Served(model, deadline=deadline, silence=0.5)) as again:
            assert again.player.restore(OF, tasks[0], steps, again.sink)
            assert ((await again.play(tasks[0])).stop_reason == "environment_timeout") is is_over


async def test_only_an_agent_that_can_resume_is_restored(model: Path, tasks: list[Task]) -> None:
    async with aclosing(Served(model, silence=0.2)) as served:
        assert served.player.restore(OF, tasks[0], steps_table(()), served.sink)
        assert (await served.play(tasks[0])).stop_reason == "environment_error"  # nothing was heard of it
        other = RunPlayer(Config(env=EnvConfig(), agents=AgentsConfig()), model, served.engine)
        assert not other.resumes and not other.restore(OF, tasks[0], steps_table(()), served.sink)


async def test_a_session_that_nobody_plays_yet_is_finished_only_once_the_buffer_has_its_end(
    served: Served, tasks: list[Task]
) -> None:
    assert served.player.restore(OF, tasks[0], steps_table(()), served.sink)
    finishing = asyncio.create_task(served.post(FINISH, {"reward": 1.0}))
    await asyncio.wait({finishing}, timeout=0.2)
    assert not finishing.done()
    assert (await served.play(tasks[0])).reward == 1.0
    assert await finishing == (200, {})


async def test_the_recipe_for_work_on_another_machine_plays_and_finishes_a_session(
    model: Path, tasks: list[Task], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, recipe = RECIPES.read_text().partition("## Work on another machine")
    (tmp_path / "recipe_of_work.py").write_text("\n".join(re.findall(r"```python\n(.*?)```", recipe, re.DOTALL)))
    monkeypatch.syspath_prepend(tmp_path)

    async def job(request: web.Request) -> web.Response:
        work = import_module("recipe_of_work").work
        working.append(asyncio.create_task(asyncio.to_thread(work, await request.json())))
        return web.Response(status=202)

    working: list[asyncio.Task[None]] = []
    app = web.Application()
    app.router.add_post("/jobs", job)
    async with TestServer(app) as service, aclosing(Served(model)) as served, AsyncExitStack() as held:
        options = {"service": str(service.make_url("/jobs"))}
        env = EnvConfig(name="recipe_of_work:Elsewhere", trusted_modules=("recipe_of_work",), options=options)
        config = served.config.model_copy(update={"env": env})
        player = RunPlayer(config, model, served.engine, SECRET)
        held.push_async_callback(player.close)
        end = await player.play(OF, tasks[0], served.sink)
        await asyncio.gather(*working)
        assert player.resumes and (end.reward, end.n_steps, end.stop_reason) == (1.0, 1, "stop")


def test_the_secret_of_a_run_lasts_and_only_its_user_reads_it(tmp_path: Path) -> None:
    secret = run_secret(tmp_path)
    assert secret == run_secret(tmp_path)
    assert stat.S_IMODE((tmp_path / SECRET_FILE).stat().st_mode) == 0o600
    keys = [session_key(secret, name) for name in ("1-0-0", "1-0-1")]
    assert keys[0] != keys[1] and len(keys[0]) == len("1-0-0.") + 22
    assert secret.value.hex() not in f"{secret!r}{secret}"
    assert session_key(run_secret(tmp_path / "other"), "1-0-0") != keys[0]
    (tmp_path / SECRET_FILE).write_text("no hex")
    with pytest.raises(UserError, match="no secret of a run"):
        run_secret(tmp_path)


def test_the_secret_reaches_the_generators_and_no_other_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "prepare", lambda config, folder: SimpleNamespace(model_folder=folder))
    told: list[Any] = []
    monkeypatch.setattr(running, "_run_on_ray", lambda *words: told.append(words) or 0)
    (tmp_path / "run").mkdir()
    folder = RunWriter(tmp_path / "run", has_begun=True)
    config = Config.model_validate({"env": {"name": "agent", "command": ["true"]}})
    assert running._run(config, folder, None) == 0
    (secret,) = [word for word in told[0] if isinstance(word, RunSecret)]
    assert secret.value.hex() == (folder.path / SECRET_FILE).read_text()
    for file in folder.path.rglob("*"):
        assert not file.is_file() or file.name == SECRET_FILE or secret.value.hex() not in file.read_text()
