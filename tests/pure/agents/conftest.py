"""A chat over single bytes, whose template writes thinking, tools and special tokens."""

from __future__ import annotations

import pytest

from service.rollout.chat.chat import Chat
from tests.pure.rollout.test_special_tokens import THINKING_AND_JSON, tokenizer_of


@pytest.fixture(scope="session")
def bytes_chat() -> Chat:
    return Chat(tokenizer_of(THINKING_AND_JSON))
