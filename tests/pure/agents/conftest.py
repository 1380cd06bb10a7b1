"""A chat over single bytes, whose template writes thinking, tools and special tokens; the quick start's tokenizer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from baton.examples import lookup
from service.agents.session import Session
from service.rollout.chat.chat import Chat
from service.rollout.chat.tokenizer import make_tokenizer
from service.rollout.environment import Task
from service.rollout.prompts.dataset import load_tasks
from service.rollout.prompts.rows import write_rows
from tests.pure.agents.endpoint import Client, ScriptedServer, client_of, opened
from tests.pure.rollout.test_special_tokens import THINKING_AND_JSON, tokenizer_of


@pytest.fixture(scope="session")
def bytes_chat() -> Chat:
    return Chat(tokenizer_of(THINKING_AND_JSON))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model, of which there is only the tokenizer."""
    folder: Path = tmp_path_factory.mktemp("model")
    make_tokenizer(folder, lookup.vocabulary())
    return folder


@pytest.fixture(scope="module")
def tasks(model: Path) -> list[Task]:
    """Rows of the quick start without an environment of their own."""
    write_rows(model / "train.jsonl", [row | {"env_class": ""} for row in lookup.rows(6, 0)])
    return load_tasks(model / "train.jsonl")


@pytest_asyncio.fixture(loop_scope="function")
async def server(bytes_chat: Chat) -> AsyncIterator[ScriptedServer]:
    async with opened(bytes_chat) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="function")
async def session(server: ScriptedServer) -> Session:
    return server.session()


@pytest_asyncio.fixture(loop_scope="function")
async def client(server: ScriptedServer, session: Session) -> AsyncIterator[Client]:
    async with client_of(server, session) as made:
        yield made
