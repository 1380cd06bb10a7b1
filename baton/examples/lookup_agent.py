"""The quick start's task solved by a program that knows nothing of Baton except an address and a key.

It asks a chat model with the openai SDK, looks up what the model wants, and answers: `env.name: lookup_agent`.
"""

from __future__ import annotations

import ssl
from functools import cache
from typing import Any

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from baton import AgentSession, Task
from baton.examples import lookup
from baton.examples.lookup import demonstrations as demonstrations
from baton.examples.lookup import vocabulary as vocabulary


class LookupAgent:
    """The agent: an object plays one episode of the task."""

    def check_task(self, task: Task) -> None:
        """Raises if the row has no seed."""
        int(task.extra_info["seed"])

    async def play(self, session: AgentSession, task: Task, seed: int) -> None:
        """Let the policy look facts up until it gives an answer or an invalid response."""
        puzzle = lookup.puzzle(int(task.extra_info["seed"]))
        messages: list[Any] = [dict(message) for message in task.prompt]
        http = DefaultAsyncHttpxClient(verify=_certificates())
        async with AsyncOpenAI(base_url=session.base_url, api_key=session.key, http_client=http) as client:
            for _ in range(4):
                reply = await client.chat.completions.create(model="policy", messages=messages)
                said = reply.choices[0].message.content or ""
                match said.split():
                    case ["answer", value]:
                        return session.finish(float(value == puzzle.answer))
                    case ["look", entity, attribute]:
                        found = puzzle.facts.get((entity, attribute), "none")
                    case _:
                        found = "none"
                messages += [{"role": "assistant", "content": said}, {"role": "user", "content": found}]
        session.finish(0.0)


@cache
def _certificates() -> ssl.SSLContext:
    """The TLS certificates, read only once. (Each client would take 25 ms to read them, although the endpoint has no
    TLS.)"""
    return ssl.create_default_context()


def rows(n: int, seed: int) -> list[dict[str, Any]]:
    """`n` dataset rows, each with its own facts."""
    return [row | {"env_class": "lookup_agent"} for row in lookup.rows(n, seed)]
