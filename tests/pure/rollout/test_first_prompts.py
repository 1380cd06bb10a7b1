"""Rows whose prompts are too long are named before a run."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from actors.driver.prepare import prepare
from service.cli import main
from service.config import GeneratorConfig, load_config
from service.rollout.chat.special_tokens import MessagesRefused
from service.rollout.environment import Message, Task
from service.rollout.prompts.dataset import write_rows
from service.rollout.prompts.first_prompts import LOOKED_AT, too_long

QUICKSTART = "configs/quickstart.yaml"
VALIDATE = ["config", "validate", "--config", QUICKSTART]


def said(*lengths: int, seen: list[int] | None = None) -> list[str]:
    """Notes about rows of these lengths; the template refuses a prompt without tokens."""

    def prompt(messages: Sequence[Message], tools: Sequence[Any]) -> Any:
        n = len(messages[0]["content"])
        (seen if seen is not None else []).append(n)
        if n == 0:
            raise MessagesRefused("the template refuses")
        return np.zeros(n, np.int32)

    rows = [Task(f"{row}", (Message(role="user", content="x" * n),), "") for row, n in enumerate(lengths)]
    chat: Any = SimpleNamespace(prompt=prompt)
    return too_long(GeneratorConfig(max_input_length=10), rows, Path("rows.jsonl"), chat)


def test_rows_that_do_not_fit_are_counted() -> None:
    assert said(10, 1, 0) == []
    (line,) = said(5, 12, 14, 0)
    assert "it is 10, and the prompts of 2 of 4 rows looked at of rows.jsonl are longer (row 1 has 12 tokens)" in line


@pytest.mark.parametrize("n", [LOOKED_AT, LOOKED_AT + 1, 10 * LOOKED_AT + 1])
def test_a_sample_of_many_rows_is_looked_at_and_said_to_be_one(n: int) -> None:
    seen: list[int] = []
    (line,) = said(*[12] * n, seen=seen)
    assert LOOKED_AT / 2 <= len(seen) <= LOOKED_AT and f"{len(seen)} of {len(seen)} rows looked at" in line


def test_the_validation_and_a_run_name_the_setting_for_made_rows_and_for_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"prompt": "what is the age of fox ?", "extra_info": {"seed": 1}}
    write_rows(tmp_path / "mine.jsonl", [row, {**row, "prompt": "what is the age of the friend of the fox ?"}])
    words = ["data.make_rows=null", f"data.train={tmp_path}/mine.jsonl", "generator.max_input_length=13"]
    note = "generator.max_input_length: it is 13, and the prompts of 1 of 2 rows"
    assert main([*VALIDATE, *words]) == 0
    assert f"note: {note}" in capsys.readouterr().out
    assert main([*VALIDATE, *words[:2]]) == 0
    assert "note:" not in capsys.readouterr().out
    assert main([*VALIDATE, "generator.max_input_length=6"]) == 0
    assert "of 200 rows looked at of train.jsonl" in capsys.readouterr().out
    prepare(load_config([QUICKSTART], words), tmp_path / "run")
    assert f"NOTE {note}" in capsys.readouterr().out
