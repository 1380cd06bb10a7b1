"""The recipes of docs/agent-recipes.md: an agent of each library as it ships, every call exact and trained."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from service.agents.call_roles import roles_of
from service.handoff.steps.values import Role
from service.rollout.chat.chat import Chat
from tests.pure.agents.endpoint import opened, whole
from tests.pure.agents.own_environment import IN_TIME, printed_by, python_with

PAGE = Path("docs/agent-recipes.md").read_text()


def called(name: str, **arguments: Any) -> str:
    return f"<think>hm</think><tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def field(name: str, text: str) -> str:
    """A field of an answer as DSPy asks for it."""
    return f"[[ ## {name} ## ]]\n{text}\n\n"


ANTHROPIC = "anthropic==2.12.0"
LOOK, AGE = called("search", query="fox"), '{"age": 17}'


class Recipe(NamedTuple):
    packages: tuple[str, ...]
    replies: list[str]
    n_chains: int = 1
    """Conversations; the calls of each are one exact chain."""


RECIPES = {
    "openai_agents": Recipe(("openai-agents==0.24.0",), [LOOK, AGE]),
    "langgraph": Recipe(
        ("langgraph==1.2.22", "langchain==1.4.7", "langchain-openai==1.7.3"), [LOOK, called("Age", age=17)]
    ),
    "pydantic_ai": Recipe(("pydantic-ai-slim[openai]==2.68.0",), [LOOK, called("final_result", age=17)]),
    "dspy": Recipe(
        ("dspy==3.4.1",),
        [
            field("query", "age of the fox") + field("completed", ""),
            field("reasoning", "hm") + field("facts", "the fox is 17") + field("completed", ""),
            field("answer", "17") + field("completed", ""),
        ],
        n_chains=3,
    ),
    "smolagents": Recipe(("smolagents[openai]==1.26.0",), [LOOK, called("final_answer", answer=17)], n_chains=2),
    "strands": Recipe(("strands-agents[openai]==1.62.0",), [LOOK, called("Age", age=17)]),
    "litellm": Recipe(("litellm==1.106.2", "mcp"), [LOOK, "17"]),
    "autogen": Recipe(("autogen-agentchat==0.7.5", "autogen-ext[openai]==0.7.5"), [LOOK, "17"], n_chains=2),
    "anthropic": Recipe((ANTHROPIC,), [LOOK, "17"] * 2, n_chains=2),
}


@IN_TIME
@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("library", RECIPES)
async def test_an_agent_of_a_library_answers_in_exact_chains_that_are_all_trained(
    bytes_chat: Chat, library: str
) -> None:
    recipe = RECIPES[library]
    python = python_with(*recipe.packages)
    async with opened(bytes_chat) as server:
        server.allowed = replace(server.allowed, max_input_length=40_000)
        replies = iter(recipe.replies)
        server.say = lambda prompt: next(replies, "one call too many")
        session = server.session()
        assert await printed_by(python, "recipe_program.py", library, session.base_url, session.key) == 17
        calls = session.tree.calls
        assert whole(server.steps) == server.prompts and len(calls) == len(recipe.replies)
        assert roles_of(calls) == [Role.MAIN] * len(calls)
        assert sum(call.parent is None for call in calls) == recipe.n_chains
        (row,) = (line for line in PAGE.splitlines() if line.startswith("|") and f"`{library}`" in line)
        ignored = {name for _, name in server.endpoint.calls._noted}
        assert ignored <= set(re.findall(r"`([\w.]+)`", row)), (sorted(ignored), dict(server.endpoint.requests.refused))
