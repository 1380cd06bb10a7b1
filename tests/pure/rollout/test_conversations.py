"""Conversations of `baton sft` and of demonstrations: which tokens are learned, and how a wrong row is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from service.errors import UserError
from service.rollout.chat.chat import Chat
from service.rollout.engine import Mode
from service.rollout.environment import Message
from service.rollout.prompts.conversations import conversation_rows, rows_with_loss_mask, unknown_note
from service.types import SupervisedRow
from tests.pure.rollout.conftest import QUESTION, ScriptedEngine, ScriptedEnvironment, generated, play, told

USER, ANSWER = {"role": "user", "content": "look fox age"}, {"role": "assistant", "content": "answer 17"}


def written(folder: Path, *rows: object) -> Path:
    (file := folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_every_message_of_the_assistant_is_learned_with_its_end_and_nothing_else(chat: Chat, tmp_path: Path) -> None:
    messages = [*QUESTION.prompt, ANSWER, USER, {**ANSWER, "content": "17", "name": None}]
    (row,) = conversation_rows(written(tmp_path, {"messages": messages, "source": "x"}), chat, "append", 100)
    whole = chat.prompt(messages[:-1])  # type: ignore[arg-type]
    last = np.append(chat.plain("17"), chat.end_id)
    assert row.token_ids.tolist() == [*whole, *last]
    learned = [*chat.plain("answer 17"), chat.end_id, *last]
    assert row.token_ids[row.loss_mask].tolist() == learned


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ([1], "Expected `object`"),
        ({"messages": 3}, "Expected `array`"),
        ({"messages": [USER, {"role": "gpt", "content": "y"}]}, """write "role": "assistant" .*'gpt'"""),
        ({"messages": [USER, {"role": "critic", "content": "y"}]}, r"'critic' - at `\$.messages\[1\].role`; a row is"),
        ({"messages": [USER, {**ANSWER, "weight": 0}]}, r"unknown field `weight` - at `\$.messages\[1\]`"),
        ({"messages": [USER, ANSWER], "tools": [{}]}, r"`\$.tools`"),
        ({"messages": [USER, USER]}, "nothing to learn"),
        ({"messages": [ANSWER, USER]}, "must follow a message of another role"),
        ({"messages": [USER, {**ANSWER, "content": "\ud800"}]}, "surrogate"),
        ({"messages": [USER, {**ANSWER, "content": "look " * 40}]}, "a row may have 40 .*max_input_length"),
    ],
)  # fmt: skip
def test_a_wrong_row_is_refused_with_its_file_and_number(chat: Chat, tmp_path: Path, row: object, why: str) -> None:
    file = written(tmp_path, {"messages": [USER, ANSWER]}, row)
    with pytest.raises(UserError, match=rf"rows\.jsonl, row 1: .*{why}"):
        conversation_rows(file, chat, "append", 40)


def test_no_json_and_no_rows_are_refused(chat: Chat, tmp_path: Path) -> None:
    (file := tmp_path / "rows.jsonl").write_text('{"messages": []}\nx{\n')
    with pytest.raises(UserError, match=r"rows\.jsonl, row 1: no JSON"):
        conversation_rows(file, chat, "append", 40)
    with pytest.raises(UserError, match="there are no rows"):
        conversation_rows(written(tmp_path), chat, "append", 40)


def test_answers_that_the_tokenizer_cannot_write_are_counted(chat: Chat, tmp_path: Path) -> None:
    known, unknown = {"messages": [{**USER, "content": "zzz"}, ANSWER]}, {**ANSWER, "content": "answer zzz"}
    assert unknown_note(conversation_rows(written(tmp_path, known), chat, "append", 100), chat) is None
    rows = conversation_rows(written(tmp_path, known, {"messages": [USER, unknown]}), chat, "append", 100)
    note = unknown_note(rows, chat)
    assert note == "1 of 6 learned tokens are <|unk|>: the tokenizer lacks characters of the answers"


# -- as an episode of the same words -----------------------------------------------------------------------------------

SAID = ("what is none look fox age", "what is none look owl age", "answer 17")
TOLD = ("24", "17")
DEMONSTRATION = [
    *QUESTION.prompt,
    *(
        message
        for said, read in zip(SAID, (*TOLD, ""), strict=True)
        for message in (Message(role="assistant", content=said), Message(role="user", content=read))
    ),
][:-1]


async def episode(chat: Chat, mode: Mode) -> list[SupervisedRow]:
    """What the agent loop makes of the same words."""
    said = iter(SAID)
    closes = mode != "inline"

    def script(words: list[str]) -> object:
        token_ids = chat.plain(next(said)).tolist()
        return generated([*token_ids, chat.end_id] if closes else token_ids, sampled_end=closes)

    environment = ScriptedEnvironment([*map(told, TOLD), told("x", 1.0, True)])
    steps, _ = await play(chat, ScriptedEngine(chat, script), environment, conversation=mode)  # type: ignore[arg-type]
    rows: list[SupervisedRow] = []
    for step in steps:
        ids = np.concatenate([step.prompt_ids, step.response_ids])
        mask, before = np.arange(len(ids)) >= len(step.prompt_ids), (ids[:0], np.zeros(0, np.bool_))
        if step.extends is not None:
            before = rows[-1].token_ids[: step.extends.length], np.zeros(step.extends.length, np.bool_)
            if step.extends.length == len(rows[-1].token_ids):  # it continues the row
                before = rows.pop()
        rows.append(SupervisedRow(np.append(before[0], ids), np.append(before[1], mask)))
    return rows


@pytest.mark.parametrize(("mode", "n_rows"), [("append", 1), ("rerender", 3), ("inline", 1)])
async def test_a_demonstration_follows_the_conversation_mode(stripping_chat: Chat, mode: Mode, n_rows: int) -> None:
    shown = rows_with_loss_mask(stripping_chat, mode, [DEMONSTRATION])
    played = await episode(stripping_chat, mode)
    assert len(shown) == len(played) == n_rows
    for mine, theirs in zip(shown, played, strict=True):
        assert mine.token_ids.tolist() == theirs.token_ids.tolist()
        assert mine.loss_mask.tolist() == theirs.loss_mask.tolist()
