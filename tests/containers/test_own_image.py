"""The example that plays trajectories in containers of a user's own image, with podman."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from baton.examples.podman_agent import InPodman, podman
from service.agents.session import Session
from service.rollout.chat.chat import Chat
from service.rollout.env_guard import EnvGuard
from service.rollout.environment import Message, Task, TrajectoryFailed
from tests.pure.agents.endpoint import ScriptedServer, opened, whole

pytestmark = [pytest.mark.full, pytest.mark.slow, pytest.mark.usefixtures("nothing_left")]
TASK = Task("p", (Message(role="user", content="Make the colour blue."),), "")
ASK = """wget -q -O - --header "Authorization: Bearer $OPENAI_API_KEY" --header "Content-Type: application/json" \
--post-data '{"model": "policy", "messages": [{"role": "user", "content": "Make the colour blue."}]}' \
"$OPENAI_BASE_URL/chat/completions" """
BLUE = '[ "$(cat colour.txt)" = blue ]'


async def played(
    server: ScriptedServer, agent: str, score: str = BLUE, deadline: float = 60.0, **options: str
) -> Session:
    session = server.session()
    guard = EnvGuard("podman", lambda: InPodman("localhost/busybox:1", agent, score, **options), server.allowed)
    try:
        async with asyncio.timeout(deadline):
            await guard.play(session, TASK, 0)
    finally:
        await guard.close(session.trajectory)
    return session


async def test_an_agent_in_a_container_calls_the_policy_and_its_score_is_the_reward(bytes_chat: Chat) -> None:
    async with opened(bytes_chat) as server:
        server.say = lambda prompt: "blue"
        right = await played(server, f'{ASK} | sed \'s/.*"content": *"\\([a-z]*\\)".*/\\1/\' > colour.txt')
        wrong, none = await played(server, "echo red > colour.txt"), await played(server, "true")
    assert whole(server.steps) == server.prompts and len(server.prompts) == 1
    assert [session.ended.result().reward for session in (right, wrong, none)] == [1.0, 0.0, 0.0]


async def test_the_container_reaches_the_session_alone_and_sees_no_other_secret(
    bytes_chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "another secret")
    other = await asyncio.start_server(lambda reader, writer: None, "0.0.0.0", 0)
    port = other.sockets[0].getsockname()[1]
    async with other, opened(bytes_chat) as server:
        session = await played(server, f"touch colour.txt; env; ls /sys/class/net; nc -w 2 127.0.0.1 {port} && echo in")
    said = session.transcript
    assert session.key in said and "another secret" not in said
    assert "eth" not in said and "in" not in said.splitlines()


@pytest.mark.parametrize(
    ("agent", "score", "why"), [("exit 3", BLUE, 3), ("kill -9 $$", BLUE, 137), ("true", "exit 2", None)]
)
async def test_a_container_that_fails_gives_no_reward(
    bytes_chat: Chat, agent: str, score: str, why: int | None
) -> None:
    async with opened(bytes_chat) as server:
        if why is None:
            with pytest.raises(TrajectoryFailed, match="podman exec: exit code 2"):
                await played(server, agent, score)
        else:
            outcome = (await played(server, agent, score)).ended.result()
            assert (outcome.reward, outcome.status, outcome.exit_code) == (None, "failed", why)


async def test_a_deadline_or_a_cancelled_trajectory_ends_the_container(bytes_chat: Chat, tmp_path: Path) -> None:
    async with opened(bytes_chat) as server:
        with pytest.raises(TimeoutError):
            await played(server, "sleep 100", deadline=3.0)
    assert await podman("ps", "-aq") == (0, "")
