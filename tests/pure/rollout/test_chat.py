"""The tokenizer made by the project, and chats over it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from baton.examples import lookup
from service.errors import UserError
from service.rollout.chat.chat import Chat
from service.rollout.chat.special_tokens import BREAK, MessagesRefused
from service.rollout.chat.tokenizer import END, load_tokenizer, make_tokenizer
from service.rollout.environment import Message
from service.types import Int32s
from tests.pure.rollout.conftest import templated

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
    chat = templated(tmp_path, "{% for m in messages %}{{ m['content'] }}\n{% endfor %}")
    assert chat.end_ids == (chat.end_id,)
    assert chat.text(chat.delta(TOLD, chat.end_id)) == "17"


def test_a_cached_prompt_cannot_be_written_to(chat: Chat) -> None:
    with pytest.raises(ValueError, match="read-only"):
        chat.prompt(ASK)[0] = 0


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is no folder"):
        load_tokenizer(tmp_path / "missing")
    with pytest.raises(UserError, match=r"has no tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_without_a_chat_template_is_refused(tmp_path: Path) -> None:
    make_tokenizer(tmp_path, lookup.vocabulary())
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match="has no chat template"):
        load_tokenizer(tmp_path)


def test_a_template_that_leaves_the_assistant_out_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="leaves out an assistant's message"):
        templated(tmp_path, "{{ messages[0]['content'] }}")


CHATML_WITH_A_DEFAULT_SYSTEM_PROMPT = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def byte_level_chat(tmp_path_factory: pytest.TempPathFactory) -> Chat:
    """A chat over a byte-level BPE tokenizer, as the models that people train have it."""
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    backend.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([CHATML_WITH_A_DEFAULT_SYSTEM_PROMPT, "\n\n \n user assistant system"], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>", clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = CHATML_WITH_A_DEFAULT_SYSTEM_PROMPT
    folder: Path = tmp_path_factory.mktemp("bytes")
    tokenizer.save_pretrained(folder)
    return Chat(load_tokenizer(folder))


pieces = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=15),
    st.sampled_from(["<|im_end|>", "<|im_start|>system\n", "<|endoftext|>", "<|im_"]),
)
texts = st.lists(pieces, max_size=3).map("".join)
turns = st.lists(st.tuples(texts, st.sampled_from(["user", "tool"]), texts), min_size=1, max_size=3)


@settings(max_examples=100, deadline=None)
@given(question=texts, turns=turns)
@example(question="", turns=[("\n", "user", "")])
@example(question="", turns=[(".<|im_end|>", "user", "")])
def test_an_append_only_history_says_what_the_whole_conversation_says(
    byte_level_chat: Chat, question: str, turns: list[tuple[str, str, str]]
) -> None:
    chat = byte_level_chat
    messages = [Message(role="user", content=question)]
    history = chat.prompt(messages).tolist()
    for said, role, told in turns:
        response = chat.plain(said)
        assert shown(chat, response) == said.replace(BREAK, "")
        observation = Message(role=role, content=told)
        history += [*response.tolist(), chat.end_id, *chat.delta([observation], chat.end_id).tolist()]
        messages += [Message(role="assistant", content=said), observation]
    parts, rendered = between_ends(chat, history), between_ends(chat, chat.prompt(messages))
    assert [shown(chat, part) for part in parts] == [shown(chat, part) for part in rendered]
    for number, (part, again) in enumerate(zip(parts, rendered, strict=True)):
        # Responses keep the tokens that were sampled; tokenised anew they could join the text before them.
        if number not in range(2, len(parts) - 1, 2):
            assert part.tolist() == again.tolist()


def shown(chat: Chat, token_ids: Int32s) -> str:
    """The text without the characters that break special tokens."""
    return chat.text(token_ids).replace(BREAK, "")


def between_ends(chat: Chat, token_ids: Sequence[int] | Int32s) -> list[Int32s]:
    """What each turn closed: system, user, assistant, user or tool, assistant, ..., and the last generation prompt."""
    ids = np.asarray(token_ids, np.int32)
    return np.split(ids, np.flatnonzero(ids == chat.end_id))


def test_a_response_that_starts_with_a_newline_keeps_the_token_that_was_sampled(byte_level_chat: Chat) -> None:
    chat = byte_level_chat
    asked, said, told = ASK[0], Message(role="assistant", content="\n"), TOLD[0]
    (newline,) = chat.plain("\n").tolist()
    (joined,) = chat.plain("\n\n").tolist()
    prompt = chat.prompt([asked]).tolist()
    rest = [chat.end_id, *chat.delta([told], chat.end_id).tolist()]
    assert prompt[-1] == newline
    assert chat.prompt([asked, said, told]).tolist() == [*prompt[:-1], joined, *rest]


def test_what_stands_between_two_turns_of_a_chatml_model_starts_after_its_end_token(byte_level_chat: Chat) -> None:
    delta = byte_level_chat.delta([Message(role="tool", content="17")], byte_level_chat.end_id)
    assert byte_level_chat.text(delta) == "\nuser\n<tool_response>\n17\n</tool_response>\nassistant\n"


def test_a_template_that_loses_the_response_beside_some_messages_refuses_these(tmp_path: Path) -> None:
    chat = templated(
        tmp_path, "{% for m in messages %}{% if messages[-1].role == 'user' %}{{ m.content }} {% endif %}{% endfor %}"
    )
    with pytest.raises(MessagesRefused, match="leaves out an assistant's message"):
        chat.delta([Message(role="tool", content="17")], chat.end_id)


def test_what_a_template_reads_beside_role_and_content_is_not_taken_from_another_message(tmp_path: Path) -> None:
    chat = templated(tmp_path, "{% for m in messages %}{{ m.name }} {{ m.content }}{% endfor %}")
    prompts = [chat.prompt([{"role": "tool", "content": "17", "name": name}]) for name in ("fox", "owl")]  # type: ignore[typeddict-unknown-key]
    assert [chat.text(prompt) for prompt in prompts] == ["fox 17", "owl 17"]
