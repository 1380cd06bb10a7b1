"""The tokenizer made by the project, and chats over it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from service.errors import UserError
from service.rollout.chat import Chat
from service.rollout.environment import Message
from service.rollout.environments import lookup
from service.rollout.tokenizer import END, load_tokenizer, make_tokenizer

ASK = [Message(role="user", content="what is the age of fox ?")]
TOLD = [Message(role="user", content="17")]


def test_a_made_tokenizer_reads_the_same_beside_the_config_of_its_model(tmp_path: Path) -> None:
    make_tokenizer(tmp_path, lookup.vocabulary())
    alone = Chat(load_tokenizer(tmp_path)).prompt(ASK).tolist()
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}))
    assert Chat(load_tokenizer(tmp_path)).prompt(ASK).tolist() == alone
    assert len(alone) == 12


def test_the_delta_starts_with_the_end_only_where_the_response_has_none(chat: Chat) -> None:
    closed = chat.delta(TOLD, chat.end_id).tolist()
    other = int(chat.encode("fox")[0])
    assert chat.delta(TOLD, other).tolist() == [chat.end_id, *closed]
    assert chat.text(chat.delta(TOLD, other)) == "user 17 assistant"


def test_the_end_of_a_turn_is_the_token_that_the_template_closes_it_with(tmp_path: Path) -> None:
    make_tokenizer(tmp_path, lookup.vocabulary())
    tokenizer = load_tokenizer(tmp_path)
    tokenizer.eos_token = "<|pad|>"
    chat = Chat(tokenizer)
    assert chat.end_id == tokenizer.convert_tokens_to_ids(END)
    assert chat.end_ids == (chat.end_id, tokenizer.convert_tokens_to_ids("<|pad|>"))


def test_without_a_closing_token_in_the_template_the_tokenizers_own_end_is_appended(tmp_path: Path) -> None:
    make_tokenizer(tmp_path, lookup.vocabulary())
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}\n{% endfor %}")
    chat = Chat(load_tokenizer(tmp_path))
    assert chat.end_ids == (chat.end_id,)
    assert chat.text(chat.delta(TOLD, chat.end_id)) == "17"


def test_a_cached_prompt_cannot_be_written_to(chat: Chat) -> None:
    with pytest.raises(ValueError, match="read-only"):
        chat.prompt(ASK)[0] = 0


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is no folder"):
        load_tokenizer(tmp_path / "missing")
    with pytest.raises(UserError, match="no tokenizer can be read"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_without_a_chat_template_is_refused(tmp_path: Path) -> None:
    make_tokenizer(tmp_path, lookup.vocabulary())
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match="has no chat template"):
        load_tokenizer(tmp_path)


def test_a_template_that_leaves_the_assistant_out_is_refused(tmp_path: Path) -> None:
    make_tokenizer(tmp_path, lookup.vocabulary())
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    with pytest.raises(UserError, match="leaves out an assistant's message"):
        Chat(load_tokenizer(tmp_path))
