"""A chat over single bytes, whose template writes thinking, tools and special tokens; the quick start's tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.examples import lookup
from service.rollout.chat.chat import Chat
from service.rollout.chat.tokenizer import make_tokenizer
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
