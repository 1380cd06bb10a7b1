"""Demonstrations become the tokens that an episode of the same words has, however a turn follows another."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from baton.examples import lookup
from service.rollout.chat.chat import Chat
from service.rollout.chat.conversation import Mode
from service.rollout.chat.tokenizer import load_tokenizer, make_tokenizer
from service.rollout.environment import Message
from service.rollout.prompts.conversations import rows_with_loss_mask
from service.types import SupervisedRow
from tests.pure.rollout.conftest import QUESTION, ScriptedEngine, ScriptedEnvironment, generated, play, told

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


@pytest.fixture(scope="module")
def stripping_chat(tmp_path_factory: pytest.TempPathFactory) -> Chat:
    """A chat whose template drops an earlier turn's words before `none`, as real ones drop its thoughts."""
    folder: Path = tmp_path_factory.mktemp("stripping")
    make_tokenizer(folder, lookup.vocabulary())
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{{ m.content.split('none')[-1] if m.role == 'assistant' else m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return Chat(load_tokenizer(folder))


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
