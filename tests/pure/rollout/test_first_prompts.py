"""A first prompt that is too long is named before a run, if the environment gives the row's prompt."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from baton.examples.lookup import Lookup
from service.cli import main
from service.config import EnvConfig, GeneratorConfig
from service.errors import UserError
from service.rollout.chat.special_tokens import MessagesRefused
from service.rollout.environment import Message, Task
from service.rollout.prompts.dataset import write_rows
from service.rollout.prompts.first_prompts import LOOKED_AT, too_long
from service.run.inputs import check_first_prompts

VALIDATE = ["config", "validate", "--config", "configs/quickstart.yaml"]
ROWS = Path("rows.jsonl")


class GivesTheRow:
    async def reset(self, row: Task, seed: int) -> Sequence[Message]:
        """The row's prompt."""
        if seed < 0:
            return row.prompt
        return row.prompt


class WritesItsOwn:
    async def reset(self, task: Task, seed: int) -> Sequence[Message]:
        return task.prompt if seed < 0 else task.prompt[:1]


class ChangesTheRow:
    async def reset(self, task: Task, seed: int) -> Sequence[Message]:
        task = Task(task.uid, task.prompt[:1], "")
        return task.prompt


class GivesMore(Lookup):
    async def reset(self, task: Task, seed: int) -> Sequence[Message]:
        return [*await super().reset(task, seed), Message(role="user", content="?")]


class Plays:
    async def play(self, session: Any, task: Task, seed: int) -> None: ...


def env(made: Any) -> EnvConfig:
    return EnvConfig(name=f"{__name__}:{made.__name__}", trusted_modules=(__name__,))


def rows(*lengths: int) -> list[Task]:
    return [Task(f"{row}", (Message(role="user", content="x" * n),), "") for row, n in enumerate(lengths)]


def chat(seen: list[int] | None = None) -> Any:
    """A chat whose prompts have a token for each letter, and that refuses a prompt without letters."""

    def prompt(messages: Sequence[Message], tools: Sequence[Any]) -> Any:
        n = len(messages[0]["content"]) + len(tools)
        (seen if seen is not None else []).append(n)
        if n == 0:
            raise MessagesRefused("the template refuses")
        return np.zeros(n, np.int32)

    return SimpleNamespace(prompt=prompt)


def said(made: Any, *lengths: int, most: int = 10) -> list[str]:
    return too_long(env(made), GeneratorConfig(max_input_length=most), rows(*lengths), ROWS, chat())


def test_rows_that_all_fit_are_not_spoken_of() -> None:
    assert said(GivesTheRow, 10, 1) == []


def test_no_row_that_fits_is_refused_with_the_shortest() -> None:
    with pytest.raises(
        UserError, match=r"^generator\.max_input_length: it is 10, and the shortest first prompt of rows"
    ):
        said(GivesTheRow, 13, 12, 14)
    with pytest.raises(UserError, match=r"has 12 tokens \(row 1, of 3 rows looked at\); raise it$"):
        said(GivesTheRow, 13, 12, 14)


def test_some_rows_that_do_not_fit_are_counted() -> None:
    [line] = said(GivesTheRow, 5, 12, 14)
    assert "the first prompts of 2 of 3 rows looked at of rows.jsonl are longer (row 1 has 12 tokens)" in line
    assert len(said(GivesTheRow, 0, 12)) == 1, "a row that the template refuses is no row that is too long"


@pytest.mark.parametrize("made", [WritesItsOwn, ChangesTheRow, GivesMore, Plays])
def test_a_prompt_that_only_the_environment_knows_is_not_judged(made: Any) -> None:
    assert said(made, 12) == []


def test_a_row_of_another_environment_may_fit() -> None:
    long, other = rows(12, 12)
    mixed = [long, Task("other", other.prompt, f"{__name__}:WritesItsOwn")]
    [line] = too_long(env(GivesTheRow), GeneratorConfig(max_input_length=10), mixed, ROWS, chat())
    assert "1 of 2 rows" in line


@pytest.mark.parametrize("n", [LOOKED_AT, LOOKED_AT + 1, 10 * LOOKED_AT + 1])
def test_a_sample_of_many_rows_is_looked_at_and_said_to_be_one(n: int) -> None:
    seen: list[int] = []
    tasks = rows(*[12] * n)
    with pytest.raises(UserError, match=r"of \d+ rows looked at") as refused:
        too_long(env(GivesTheRow), GeneratorConfig(max_input_length=10), tasks, ROWS, chat(seen))
    assert LOOKED_AT / 2 <= len(seen) <= LOOKED_AT and f"of {len(seen)} rows looked at" in str(refused.value)


def test_the_validation_names_the_setting_for_made_rows_and_for_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*VALIDATE, "generator.max_input_length=4"]) == 2
    err = capsys.readouterr().err
    assert "max_input_length=4: it is 4, and the shortest first prompt of train.jsonl has" in err
    assert err.count("\n") == 1
    row = {"prompt": "what is the age of fox ?", "extra_info": {"seed": 1}}
    write_rows(tmp_path / "mine.jsonl", [row, {**row, "prompt": "what is the age of the friend of the fox ?"}])
    words = ["data.make_rows=null", f"data.train={tmp_path}/mine.jsonl", "generator.max_input_length=13"]
    assert main([*VALIDATE, *words]) == 0
    assert "note: generator.max_input_length: it is 13, and the first prompts of 1 of 2 rows" in capsys.readouterr().out
    assert main([*VALIDATE, *words[:2]]) == 0
    assert "note:" not in capsys.readouterr().out


def test_the_preparation_of_a_run_says_or_refuses_the_same(
    made_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "what is the age of fox ?"
    prompts = [words, f"{words} {words} {words}"]
    tasks = [Task(prompt, (Message(role="user", content=prompt),), "") for prompt in prompts]
    check_first_prompts(EnvConfig(), GeneratorConfig(max_input_length=16), tasks, ROWS, made_model)
    out = capsys.readouterr()
    assert "NOTE generator.max_input_length: it is 16, and the first prompts of 1 of 2 rows" in out.out + out.err
    with pytest.raises(UserError, match=r"^generator\.max_input_length: it is 4, "):
        check_first_prompts(EnvConfig(), GeneratorConfig(max_input_length=4), tasks, ROWS, made_model)
