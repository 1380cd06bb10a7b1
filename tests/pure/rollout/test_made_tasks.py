"""The made tasks of two recipes: a solver with a verifier, and a text that is longer than the context."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from baton.examples import lookup, reading, solver_verifier
from baton.examples.reading import Reading
from baton.examples.solver_verifier import RIGHT, VERIFIER, WRONG, SolverVerifier
from service.handoff.prefixes.merge import merge_steps
from service.handoff.steps.values import roles_from
from service.rollout.chat.chat import Chat
from service.rollout.chat.tokenizer import load_tokenizer, make_tokenizer
from service.rollout.environment import Task
from service.rollout.environments.registry import make_environment, synthetic_data
from service.rollout.prompts.loss_mask import rows_with_loss_mask
from tests.pure.rollout.conftest import ScriptedEngine, play

MODULES = {"solver_verifier": solver_verifier, "reading": reading}


def task_of(row: dict[str, object]) -> Task:
    return Task("p", tuple(row["prompt"]), str(row["env_class"]), {}, row["extra_info"])  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def chat_of_both(tmp_path_factory: pytest.TempPathFactory) -> Chat:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder, (*solver_verifier.vocabulary(), *reading.vocabulary()))
    return Chat(load_tokenizer(folder))


@pytest.mark.parametrize("name", MODULES)
def test_rows_demonstrations_and_the_environment_are_found_by_name(name: str, chat_of_both: Chat) -> None:
    made = synthetic_data(name, (), "demonstrations")
    rows = rows_with_loss_mask(chat_of_both, "append", made.demonstrations(64, 0.5, np.random.default_rng(0)))
    assert len(rows) == 64 and all(row.loss_mask.any() for row in rows)
    make_environment(name, {}).check_task(task_of(made.rows(1, 0)[0]))  # type: ignore[attr-defined]


@pytest.mark.parametrize("shows_right", [True, False])
@pytest.mark.parametrize("answers_right", [True, False])
@pytest.mark.parametrize("verdict", [RIGHT, WRONG])
async def test_solver_and_verifier_are_rewarded_each_for_its_own_part(
    chat_of_both: Chat, answers_right: bool, shows_right: bool, verdict: str
) -> None:
    [row] = solver_verifier.rows(1, 3)
    puzzle = lookup.puzzle(row["extra_info"]["seed"])
    right, wrong = f"answer {puzzle.answer}", "answer owl"
    answer = right if answers_right else wrong
    says = iter([f"look {puzzle.subject} {puzzle.attribute}", answer, verdict])
    engine = ScriptedEngine(chat_of_both, lambda words: next(says))
    steps, end = await play(
        chat_of_both,
        engine,
        SolverVerifier(),
        task_of(row),
        seed=1 - shows_right,
        roles={"main": None, VERIFIER: None},
        max_input_length=128,
    )
    knows = float((verdict == RIGHT) == shows_right)
    assert roles_from(end.roles, 3, [VERIFIER]) == ["main", "main", VERIFIER]
    assert [step.reward for step in steps] == [0.0, float(answers_right), knows] and end.reward == answers_right
    record = f"{puzzle.subject} {puzzle.attribute} {puzzle.answer}"
    *_, shown = chat_of_both.text(np.array(engine.prompts[2])).removesuffix(" assistant").partition(f"{record} ? ")
    assert shown == answer if answers_right == shows_right else (shown == right) == shows_right


async def test_a_solver_that_never_answers_is_ended_without_a_verdict(chat_of_both: Chat) -> None:
    [row] = solver_verifier.rows(1, 3)
    engine = ScriptedEngine(chat_of_both, lambda words: "look fox age")
    steps, end = await play(
        chat_of_both,
        engine,
        SolverVerifier(),
        task_of(row),
        max_turns=9,
        max_input_length=128,
        roles={"main": None, VERIFIER: None},
    )
    assert len(steps) == solver_verifier.MAX_ACTIONS and (end.reward, end.stop_reason, end.roles) == (0.0, "stop", b"")


def reads(words: list[str]) -> str:
    """What a reader says that keeps what it is asked for."""
    entity, attribute = words[words.index("?") - 1], words[words.index("of") - 1]
    values = [c for a, b, c in zip(words, words[1:], words[2:], strict=False) if (a, b) == (entity, attribute)]
    notes = [b for a, b in pairwise(words) if a == reading.NOTE]
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
