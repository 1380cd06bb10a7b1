"""Counts and ends of sessions in bodies that no client should send: refused in form, or answered exactly."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

import pytest

from service.rollout.chat.chat import Chat
from tests.pure.agents.endpoint import GENERATE, Client, House, client_of, opened, whole
from tests.pure.agents.test_dialect_fuzz import VALID, mutated

SAMPLING = {"max_tokens": 5, "temperature": 0.5, "n": 1, "stop": [], "logprobs": 1, "stop_token_ids": [4]}
BODIES: Mapping[str, dict[str, Any]] = {
    GENERATE: {"model": "policy", "token_ids": [17, 4], "sampling_params": SAMPLING, "stream": False, "priority": 0},
    "/v1/messages/count_tokens": {k: v for k, v in VALID["/v1/messages"].items() if k not in ("max_tokens", "stream")},
    "/rl/sessions/0/reward": {"reward": 0.5},
    "/rl/sessions/0/finish": {"reward": 0.5, "status": "ok", "transcript": "é"},
}


@pytest.mark.parametrize("n_bodies", [200, pytest.param(10_000, marks=pytest.mark.full)])
async def test_a_mutated_body_of_a_route_is_refused_in_form_or_answered(bytes_chat: Chat, n_bodies: int) -> None:
    answered = dict.fromkeys(BODIES, 0)
    async with opened(bytes_chat) as house:
        session = house.session()
        async with client_of(house, session) as client:
            for seed in range(n_bodies):
                r = random.Random(seed)
                path = r.choice([*BODIES])
                body = mutated(r, BODIES[path]) if r.random() < 0.8 else BODIES[path]
                answered[path] += await is_answered(house, client, path, json.dumps(body).encode(), seed)
                if session.state != "open":
                    house.sessions.remove(session)
                    session = house.session(seed + 1)
                    client.headers = {"x-api-key": session.key}
    assert all(answered.values()), answered


async def is_answered(house: House, client: Client, path: str, raw: bytes, seed: int) -> bool:
    """Whether the body got an answer; a refusal has the form of an error, and only a call makes a step."""
    house.steps.clear()
    house.prompts.clear()
    status, reply = await client.post(path, raw)
    assert status == 200 or 400 <= status < 500, f"seed {seed}: {status} {reply}"
    assert (status == 200) is ("error" not in reply), f"seed {seed}: {reply}"
    if path == GENERATE and status == 200:
        (step,), (prompt,) = house.steps, house.prompts
        assert step.response_ids[step.loss_mask].tolist() == reply["choices"][0]["token_ids"]
        assert step.extends is not None or whole([step]) == [prompt]
    else:
        assert not house.steps
    return status == 200
