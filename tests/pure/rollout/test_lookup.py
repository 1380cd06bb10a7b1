"""The built-in task: facts, rows, words and demonstrations."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from baton.examples import lookup
from baton.examples.lookup import Lookup
from service.config.agent_command import AGENT
from service.errors import UserError
from service.rollout.chat.chat import Chat
from service.rollout.environment import Message, Task
from service.rollout.environments.registry import synthetic_data
from service.rollout.prompts.loss_mask import rows_with_loss_mask


def task(seed: int) -> Task:
    return Task("p", ({"role": "user", "content": lookup.puzzle(seed).question},), "lookup", {}, {"seed": seed})


async def test_the_store_answers_what_it_holds_and_none_otherwise() -> None:
    episode, facts = Lookup(), lookup.puzzle(5).facts
    await episode.reset(task(5), seed=0)
    for text, wanted in [
        ("look fox age", facts["fox", "age"]),
        ("look fox friend", facts["fox", "friend"]),
        ("look 17 age", "none"),
        ("look fox", "none"),
        ("", "none"),
        ("what is the age of fox ?", "none"),
    ]:
        result = await episode.step(text)
        assert (result.messages[0]["content"], result.reward, result.done) == (wanted, 0.0, False)


async def test_only_the_right_answer_is_rewarded_and_every_answer_ends_the_episode() -> None:
    right = lookup.puzzle(5).answer
    for value in lookup.VALUES:
        episode = Lookup()
        await episode.reset(task(5), seed=0)
        result = await episode.step(f"answer {value}")
        assert (result.reward, result.done) == (float(value == right), True)


def test_rows_come_from_their_seed_alone_and_each_has_facts_of_its_own() -> None:
    assert lookup.rows(20, seed=3) == lookup.rows(20, seed=3)
    assert lookup.rows(20, seed=3) != lookup.rows(20, seed=4)
    worlds = [lookup.puzzle(row["extra_info"]["seed"]) for row in lookup.rows(200, seed=3)]
    assert len({str(world.facts) for world in worlds}) == 200
    assert 40 < sum(world.hops == 2 for world in worlds) < 95  # a third of 200


def test_a_question_of_two_hops_is_answered_through_the_friend() -> None:
    world = next(world for world in map(lookup.puzzle, range(100)) if world.hops == 2)
    friend = world.facts[world.entity, "friend"]
    assert friend != world.entity
    assert (world.subject, world.answer) == (friend, world.facts[friend, world.attribute])
    assert world.question == f"what is the {world.attribute} of the friend of {world.entity} ?"


def test_knowing_the_question_alone_does_not_tell_the_answer() -> None:
    answers = Counter(
        world.answer for world in map(lookup.puzzle, range(4000)) if "age of fox" in world.question and world.hops == 1
    )
    assert len(answers) > 10


def test_every_word_of_the_task_is_one_token_of_its_own(chat: Chat) -> None:
    words = lookup.vocabulary()
    ids = chat.encode(" ".join(words)).tolist()
    assert len(set(ids)) == len(ids) == len(words)
    assert chat.text(np.asarray(ids)) == " ".join(words)
    assert 60 <= len(words) <= 75


def test_demonstrations_show_mixed_habits_of_which_the_asked_share_is_right() -> None:
    shown = lookup.demonstrations(2000, 0.15, np.random.default_rng(0))
    turns = Counter(sum(message["role"] == "assistant" for message in messages) for messages in shown)
    assert set(turns) == {1, 2, 3}
    # A fifth of the habits is a guess at once, and guesses, misread facts and random answers are hardly ever right.
    assert 0.15 < turns[1] / 2000 < 0.27
    assert all(messages[-1]["content"].startswith("answer") for messages in shown)
    assert lookup.demonstrations(50, 1.0, np.random.default_rng(1)) != lookup.demonstrations(
        50, 0.0, np.random.default_rng(1)
    )


@pytest.mark.parametrize(
    ("right_fraction", "lowest", "highest"), [(1.0, 1.0, 1.0), (0.15, 0.12, 0.18), (0.0, 0.0, 0.0)]
)
def test_demonstrations_read_and_answer_right_as_often_as_asked_for(
    right_fraction: float, lowest: float, highest: float
) -> None:
    shown = lookup.demonstrations(1000, right_fraction, np.random.default_rng(0))
    assert lowest <= np.mean([answers_what_was_read(messages) for messages in shown]) <= highest


def answers_what_was_read(messages: list[Message]) -> bool:
    """The demonstration looked up what was asked for, and answers what it was told."""
    looked, told = messages[1:-1:2], messages[2:-1:2]
    facts = {m["content"]: t["content"] for m, t in zip(looked, told, strict=True)}
    question = messages[0]["content"].split()
    subject = facts.get(f"look {question[-2]} friend") if "friend" in question else question[-2]
    return f"answer {facts.get(f'look {subject} {question[3]}')}" == messages[-1]["content"]


def test_a_demonstration_trains_what_the_assistant_says_and_is_tokenised_like_an_episode(chat: Chat) -> None:
    messages = lookup.demonstrations(1, 1.0, np.random.default_rng(0))[0]
    (row,) = rows_with_loss_mask(chat, "append", [messages])
    said = [message["content"] for message in messages if message["role"] == "assistant"]
    assert chat.text(row.token_ids[row.loss_mask]) == " ".join(said)
    ends = row.token_ids == chat.end_id
    assert int((ends & row.loss_mask).sum()) == len(said)
    whole = chat.prompt(messages).tolist()
    # The template adds the next generation prompt, which a finished conversation lacks.
    assert whole[: len(row.token_ids)] == row.token_ids.tolist()


def test_an_environment_that_makes_no_rows_says_what_to_give_instead() -> None:
    with pytest.raises(UserError, match=r"give data\.train and model\.path"):
        synthetic_data("tests.pure.rollout.misbehaving:Echo", ["tests"])
    with pytest.raises(
        UserError, match=r"'agent' runs a command, which makes no vocabulary; give data\.train and model"
    ):
        synthetic_data(AGENT, needed="vocabulary")
