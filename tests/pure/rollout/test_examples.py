"""The examples of environments that have no service beside them: what each rewards, and what each makes."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton.examples import gsm8k, lookup, reading, solver_verifier
from baton.examples.gsm8k import Gsm8k
from baton.examples.guess_number import LARGEST, GuessNumber
from baton.examples.lookup import Lookup
from baton.examples.reading import Reading
from baton.examples.solver_verifier import RIGHT, VERIFIER, WRONG, SolverVerifier
from scripts import real_model
from service.handoff.prefixes.merge import merge_steps
from service.handoff.steps.values import roles_from
from service.rollout.chat.chat import Chat
from service.rollout.chat.tokenizer import load_tokenizer, make_tokenizer
from service.rollout.environment import Environment, StepResult, Task
from service.rollout.environments.registry import make_environment, synthetic_data
from service.rollout.prompts.conversations import rows_with_loss_mask
from tests.pure.rollout.conftest import ScriptedEngine, play
from tests.pure.rollout.test_agent import optimal

MAKES_DEMONSTRATIONS = ("gsm8k", "lookup", "reading", "search_r1", "solver_verifier", "text_to_sql")


def task_of(row: dict[str, Any]) -> Task:
    return Task("p", tuple(row["prompt"]), row["env_class"], row.get("reward_spec", {}), row.get("extra_info", {}))


async def answers(environment: Environment, task: Task, *texts: str) -> list[StepResult]:
    await environment.reset(task, 0)
    return [await environment.step(text) for text in texts]


@pytest.fixture(scope="module")
def chat_of_both(tmp_path_factory: pytest.TempPathFactory) -> Chat:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder, (*solver_verifier.vocabulary(), *reading.vocabulary()))
    return Chat(load_tokenizer(folder))


@pytest.mark.parametrize("name", [*MAKES_DEMONSTRATIONS, "guess_number"])
def test_an_example_makes_rows_that_it_can_play_by_their_seed_alone(name: str) -> None:
    make = synthetic_data(name, (), "rows")
    environment: Any = make_environment(name, {})
    rows = make(30, 3)
    assert rows == make(30, 3) != make(30, 4)
    for row in rows:
        environment.check_task(task_of(row))


@pytest.mark.parametrize("name", MAKES_DEMONSTRATIONS)
def test_an_examples_words_are_in_its_vocabulary_and_each_is_one_token(name: str, tmp_path: Path) -> None:
    make_tokenizer(tmp_path, words := [*dict.fromkeys(synthetic_data(name, (), "vocabulary")())])
    chat = Chat(load_tokenizer(tmp_path))
    ids = chat.plain(" ".join(words)).tolist()
    assert len(ids) == len(words) and chat.unknown_id not in ids
    shown = synthetic_data(name, (), "demonstrations")(200, 0.5, np.random.default_rng(0))
    prompts = [row["prompt"] for row in synthetic_data(name, (), "rows")(50, 0)]
    texts = [m["content"] for messages in (*shown, *prompts) for m in messages]
    assert {word for text in texts for word in text.split()} <= set(words)
    rows = rows_with_loss_mask(chat, "append", shown)
    assert len(rows) == 200 and all(row.loss_mask.any() for row in rows)


# -- word problems -----------------------------------------------------------------------------------------------------


async def solved(text: str, truth: str = "1234", method: Any = "strict") -> float:
    [result] = await answers(Gsm8k(method), Task("p", (), "gsm8k", {"ground_truth": truth}), text)
    assert result.done
    return result.reward


@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [
        ("600 + 634 = 1234 #### 1234", 1.0, 1.0),
        ("#### 1,234", 1.0, 1.0),
        ("#### $1234.00", 1.0, 1.0),
        ("#### 7 ... no: #### 1234", 1.0, 1.0),
        ("#### 1234 ... no: #### 7", 0.0, 0.0),
        ("the answer is 1234", 0.0, 1.0),
        ("1234 and then 5", 0.0, 0.0),
        ("#### -1234", 0.0, 0.0),
        ("#### 12345", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
async def test_the_number_that_counts_is_the_last_one_that_the_method_reads(
    text: str, strict: float, flexible: float
) -> None:
    assert (await solved(text), await solved(text, method="flexible")) == (strict, flexible)


async def test_a_truth_is_a_number_or_a_worked_solution_and_the_method_is_a_known_one() -> None:
    assert await solved("#### 12", truth="5 + 7 = <<5+7=12>>12\n#### 12") == 1.0
    with pytest.raises(ValueError, match="ground_truth 'twelve' is no number"):
        await solved("#### 12", truth="twelve")
    with pytest.raises(TypeError, match="one of strict, flexible, boxed"):
        await solved("", method="loose")


def left(question: str) -> str:
    """The answer, worked out from the question's words."""
    words = question.split()
    total = int(words[3])
    for verb, change in itertools.pairwise(words):
        if verb in (*gsm8k.GAINS, *gsm8k.LOSSES):
            total += int(change) if verb in gsm8k.GAINS else -int(change)
    return str(total)


async def test_made_problems_and_right_demonstrations_agree_with_the_words_of_the_question() -> None:
    for row in gsm8k.rows(50, seed=0):
        assert row["reward_spec"]["ground_truth"] == left(row["prompt"][0]["content"])
    for right, least, most in ((1.0, 50, 50), (0.0, 0, 9)):
        shown = gsm8k.demonstrations(50, right, np.random.default_rng(0))
        assert least <= sum([await solved(a["content"], left(q["content"])) for q, a in shown]) <= most


# -- the game of `make real` -------------------------------------------------------------------------------------------


async def game(number: int, *texts: str) -> list[tuple[str, float, bool]]:
    results = await answers(GuessNumber(), Task("a", (), "guess_number", {"ground_truth": number}), *texts)
    return [(result.messages[0]["content"], result.reward, result.done) for result in results]


async def test_hints_leave_the_numbers_that_are_possible_and_lead_to_the_right_one() -> None:
    *hints, last = await game(10, "8", "13", "what?", "it is 10!")
    assert hints == [(f"{hint}?", 0.0, False) for hint in ("higher: 9 to 15", "lower: 9 to 12", "higher: 9 to 12")]
    assert last[1:] == (1.0, True)
    for number in range(1, LARGEST + 1):
        low, high, texts = 1, LARGEST, list[str]()
        while not texts or int(texts[-1]) != number:  # who halves what is left wins
            texts.append(str((low + high) // 2))
            low, high = (int(texts[-1]) + 1, high) if int(texts[-1]) < number else (low, int(texts[-1]) - 1)
        assert (await game(number, *texts))[-1][1:] == (1.0, True)
        assert (await game(number, *["0"] * 4))[-1][1:] == (0.0, True)


def test_a_row_of_another_game_is_refused_and_all_numbers_are_asked_for_equally_often() -> None:
    numbers = Counter(
        row["reward_spec"]["ground_truth"] for row in synthetic_data("guess_number", (), "rows")(2 * LARGEST, 3)
    )
    assert numbers == dict.fromkeys(range(1, LARGEST + 1), 2)
    with pytest.raises(ValueError, match="not between 1 and 15"):
        GuessNumber().check_task(Task("b", (), "guess_number", {"ground_truth": 16}))


def test_without_hub_and_index_the_model_is_refused_with_the_command_that_gets_it(tmp_path: Path) -> None:
    call = f"import sys; sys.path[:0] = [{str(Path(real_model.__file__).parent)!r}]; import real_model as it; "
    call += f"it.FOLDER = it.Path({str(tmp_path / 'model')!r}); sys.exit(it.main())"
    nowhere = {"HF_ENDPOINT": "http://127.0.0.1:1", "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_RETRIES": "0"}
    environment = {**os.environ, **nowhere}
    said = subprocess.run([sys.executable, "-c", call], env=environment, capture_output=True, text=True, timeout=120)
    assert said.returncode == 2 and f"run `hf download {real_model.MODEL} --local-dir model` and" in said.stderr
    assert not (tmp_path / "model").exists()


# -- the task of the quick start ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
async def test_a_policy_that_reads_before_it_answers_reaches_reward_one(chat: Chat, seed: int) -> None:
    task = task_of(lookup.rows(1, seed)[0])
    hops = lookup.puzzle(task.extra_info["seed"]).hops
    steps, end = await play(chat, ScriptedEngine(chat, optimal), Lookup(), task)
    assert (end.reward, end.stop_reason, end.n_steps) == (1.0, "stop", hops + 1)
    assert [step.reward for step in steps] == [0.0] * hops + [1.0]


async def test_the_store_answers_what_it_holds_and_only_the_right_answer_is_rewarded() -> None:
    puzzle = lookup.puzzle(5)
    task = Task("p", ({"role": "user", "content": puzzle.question},), "lookup", {}, {"seed": 5})
    told = {"look fox age": puzzle.facts["fox", "age"], "look fox friend": puzzle.facts["fox", "friend"]}
    told |= dict.fromkeys(("look 17 age", "look fox", "", "what is the age of fox ?"), "none")
    for text, result in zip(told, await answers(Lookup(), task, *told), strict=True):
        assert (result.messages[0]["content"], result.reward, result.done) == (told[text], 0.0, False)
    for value in lookup.VALUES:
        [result] = await answers(Lookup(), task, f"answer {value}")
        assert (result.reward, result.done) == (float(value == puzzle.answer), True)


def test_each_row_has_facts_of_its_own_so_that_the_question_alone_does_not_tell_the_answer() -> None:
    worlds = [lookup.puzzle(row["extra_info"]["seed"]) for row in lookup.rows(200, seed=3)]
    assert len({str(world.facts) for world in worlds}) == 200
    two_hops = [world for world in worlds if world.hops == 2]
    assert 40 < len(two_hops) < 95  # a third of 200
    for world in two_hops:
        friend = world.facts[world.entity, "friend"]
        assert friend != world.entity and world.answer == world.facts[friend, world.attribute]
    asked = [world for world in map(lookup.puzzle, range(4000)) if "age of fox" in world.question and world.hops == 1]
    assert len({world.answer for world in asked}) > 10


# -- two roles, and a history that is replaced -------------------------------------------------------------------------

ROLES = {"main": None, VERIFIER: None}


@pytest.mark.parametrize("shows_right", [True, False])
@pytest.mark.parametrize("answers_right", [True, False])
@pytest.mark.parametrize("verdict", [RIGHT, WRONG])
async def test_solver_and_verifier_are_rewarded_each_for_its_own_part(
    chat_of_both: Chat, answers_right: bool, shows_right: bool, verdict: str
) -> None:
    [row] = solver_verifier.rows(1, 3)
    puzzle = lookup.puzzle(row["extra_info"]["seed"])
    right, seed = f"answer {puzzle.answer}", 1 - shows_right
    answer = right if answers_right else "answer owl"
    says = iter([f"look {puzzle.subject} {puzzle.attribute}", answer, verdict])
    engine, environment = ScriptedEngine(chat_of_both, lambda words: next(says)), SolverVerifier()
    steps, end = await play(
        chat_of_both, engine, environment, task_of(row), seed=seed, roles=ROLES, max_input_length=128
    )
    knows = float((verdict == RIGHT) == shows_right)
    assert roles_from(end.roles, 3, [VERIFIER]) == ["main", "main", VERIFIER]
    assert [step.reward for step in steps] == [0.0, float(answers_right), knows] and end.reward == answers_right
    record = f"{puzzle.subject} {puzzle.attribute} {puzzle.answer}"
    *_, shown = chat_of_both.text(np.array(engine.prompts[2])).removesuffix(" assistant").partition(f"{record} ? ")
    assert shown == answer if answers_right == shows_right else (shown == right) == shows_right


async def test_a_solver_that_never_answers_is_ended_without_a_verdict(chat_of_both: Chat) -> None:
    task, limits = task_of(solver_verifier.rows(1, 3)[0]), {"max_turns": 9, "max_input_length": 128, "roles": ROLES}
    steps, end = await play(chat_of_both, "look fox age", SolverVerifier(), task, **limits)  # type: ignore[arg-type]
    assert len(steps) == solver_verifier.MAX_ACTIONS and (end.reward, end.stop_reason, end.roles) == (0.0, "stop", b"")


def reads(words: list[str]) -> str:
    """What a reader says that keeps what it is asked for."""
    entity, attribute = words[words.index("?") - 1], words[words.index("of") - 1]
    values = [c for a, b, c in zip(words, words[1:], words[2:], strict=False) if (a, b) == (entity, attribute)]
    notes = [b for a, b in itertools.pairwise(words) if a == reading.NOTE]
    found = (values or notes or [reading.NONE])[-1]
    return f"{reading.ANSWER if 'end' in words else reading.NOTE} {found}"


@pytest.mark.parametrize("compact", [True, False])
async def test_notes_in_place_of_the_history_keep_a_long_text_within_the_context(
    chat_of_both: Chat, compact: bool
) -> None:
    row = max(reading.rows(64, 0), key=lambda row: len(reading.text(row["extra_info"]["seed"]).pages))
    pages = len(reading.text(row["extra_info"]["seed"]).pages)
    assert pages == reading.MOST
    engine = ScriptedEngine(chat_of_both, reads)
    steps, end = await play(chat_of_both, engine, Reading(compact), task_of(row), max_turns=8, max_input_length=56)
    if compact:
        assert (end.reward, end.stop_reason, len(steps)) == (1.0, "stop", pages + 1)
        assert max(map(len, engine.prompts)) < 24 and len(merge_steps(steps)) == len(steps)
    else:
        assert (end.reward, end.stop_reason) == (0.0, "length") and len(steps) < pages
