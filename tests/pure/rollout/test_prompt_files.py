"""The files of prompts that a run reads, renames, mixes and makes before it starts, and what is refused then."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.driver.prepare import prepare
from baton.examples.gsm8k import Gsm8k
from service.cli import main
from service.config import Config, DataConfig, EnvConfig, GeneratorConfig, load_config
from service.config.rollout import ColumnsConfig, MixturePart
from service.errors import UserError
from service.rollout.chat.chat import MessagesRefused
from service.rollout.check_inputs import check_inputs
from service.rollout.environment import Message, Task
from service.rollout.prompts.dataset import load_tasks
from service.rollout.prompts.files import eval_files, mixed_rows, train_file
from service.rollout.prompts.first_prompts import LOOKED_AT, too_long
from service.rollout.prompts.rows import write_rows
from service.run.preparing.inputs import demonstrations

QUICKSTART = "configs/quickstart.yaml"


def part(folder: Path, name: str, n: int, weight: float = 1.0) -> MixturePart:
    path = folder / f"{name}.jsonl"
    write_rows(path, [{"prompt": f"{name} {i}", "env_class": "lookup", "seed": i} for i in range(n)])
    return MixturePart(path=path, weight=weight)


# -- mixtures ----------------------------------------------------------------------------------------------------------


def sets(rows: list[dict[str, Any]]) -> Counter[str]:
    return Counter(row["uid"].partition("/")[0] for row in rows)


def test_an_epoch_has_every_row_once_and_the_weights_proportions_evenly_interleaved(tmp_path: Path) -> None:
    rows = list(mixed_rows({"a": part(tmp_path, "a", 4, 1.0), "b": part(tmp_path, "b", 2, 3.0)}))
    assert Counter(row["prompt"] for row in rows) == {"a 0": 1, "a 1": 1, "a 2": 1, "a 3": 1, "b 0": 6, "b 1": 6}
    assert {row["uid"] for row in rows} >= {"a/a-0", "b/b-0", "b/b-0#1", "b/b-1#5"}
    for start in range(0, 16, 4):
        assert sets(rows[start : start + 4]) == {"a": 1, "b": 3}


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    weights=st.lists(st.floats(0.5, 8), min_size=4, max_size=4),
)
def test_no_dataset_is_short_of_its_share_by_more_than_a_row(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], weights: list[float]
) -> None:
    folder = tmp_path_factory.mktemp("mixture")
    parts = {f"s{i}": part(folder, f"s{i}", n, weights[i]) for i, n in enumerate(sizes)}
    rows = list(mixed_rows(parts))
    total, found = sum(p.weight for p in parts.values()), sets(rows)
    for n, (name, made) in zip(sizes, parts.items(), strict=True):
        assert found[name] >= n and abs(found[name] - len(rows) * made.weight / total) <= len(parts)
    assert len({row["uid"] for row in rows}) == len(rows)


def test_weights_that_repeat_everything_else_without_end_and_bad_rows_are_refused(tmp_path: Path) -> None:
    parts = {"a": part(tmp_path, "a", 50, 1e-4), "b": part(tmp_path, "b", 2, 1.0)}
    with pytest.raises(UserError, match=r"data\.mixture\.a\.weight: its 50 rows .* larger weight"):
        list(mixed_rows(parts))
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\n{"question": "b"}\n')
    with pytest.raises(UserError, match=r"bad\.jsonl, row 1, column prompt"):
        list(mixed_rows({"bad": MixturePart(path=tmp_path / "bad.jsonl")}))


def test_the_training_file_is_the_given_one_or_made_and_a_resumed_run_goes_on_with_the_same(tmp_path: Path) -> None:
    given_part = part(tmp_path, "a", 3)
    assert train_file(DataConfig(train=given_part.path), EnvConfig(), tmp_path, 0) == given_part.path
    data = DataConfig(make_rows=200, eval_make_rows=50, eval={"given": given_part.path})
    trained, files = train_file(data, EnvConfig(), tmp_path, 0), eval_files(data, EnvConfig(), tmp_path, 0)
    made = train_file(DataConfig(make_rows=6), EnvConfig(), tmp_path, 0)
    assert made == trained and set(files) == {"given", "made"}
    seeds = [[task.extra_info["seed"] for task in load_tasks(path)] for path in (trained, files["made"])]
    assert list(map(len, seeds)) == [200, 50] and not set(seeds[0]) & set(seeds[1])
    with pytest.raises(UserError, match="none of train, make_rows and mixture is set"):
        train_file(DataConfig(), EnvConfig(), tmp_path, 0)


# -- published files, read and scored without a converter --------------------------------------------------------------

GSM8K = {"question": "A hen lays 2 eggs, then 3. How many?", "answer": "2 + 3 = <<2+3=5>>5 eggs.\n#### 1,005"}
MATH = {
    "problem": "Half of $1$?",
    "solution": r"It is $\boxed{9}$, or rather $\boxed{\frac{1}{2}}$.",
    "level": "Level 1",
}
VERL = {"prompt": [{"role": "user", "content": "2 + 2?"}], "reward_model": {"ground_truth": "4"}, "index": 7}
OF_GSM8K = ColumnsConfig(prompt="question", ground_truth="answer", answer="hashes", instruction="End with ####.")
OF_MATH = ColumnsConfig(prompt="problem", ground_truth="solution", answer="boxed")


def written(path: Path, *rows: dict[str, Any]) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(list(rows)), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize(
    ("row", "columns", "method", "prompt", "right", "wrong", "extra"),
    [
        (GSM8K, OF_GSM8K, "strict", f"{GSM8K['question']}\nEnd with ####.", "so #### 1005", "1005", {}),
        (MATH, OF_MATH, "boxed", MATH["problem"], r"\boxed{\frac{1}{ 2 }}", r"\boxed{2}", {"level": "Level 1"}),
        (VERL, None, "flexible", "2 + 2?", "it is 4.0", "5", {"index": 7}),
        (VERL, OF_GSM8K, "flexible", "2 + 2?", "4", "5", {"index": 7}),
    ],
    ids=["gsm8k", "math", "verl", "verl-among-others"],
)  # fmt: skip
async def test_a_published_file_is_trained_and_evaluated_as_it_is(
    row: dict[str, Any], columns: ColumnsConfig | None, method: Any, prompt: str, right: str, wrong: str,
    extra: dict[str, Any], suffix: str, tmp_path: Path,
) -> None:  # fmt: skip
    file, env = written(tmp_path / f"a{suffix}", row), EnvConfig(name="gsm8k", options={"method": method})
    data = DataConfig(train=file, eval={"held_out": file}, columns=columns)
    check_inputs(env, data, 0, False, ())
    mixed = DataConfig(mixture={"part": MixturePart(path=file)}, columns=columns)
    paths = [train_file(data, env, tmp_path / "run", 0), *eval_files(data, env, tmp_path / "run", 0).values()]
    paths.append(train_file(mixed, env, tmp_path / "mixed", 0))
    for path, uid in zip(paths, ("a-0", "a-0", "part/a-0"), strict=True):
        (task,) = load_tasks(path)
        assert (task.uid, task.prompt[0]["content"], dict(task.extra_info)) == (uid, prompt, extra)
        for text, reward in ((right, 1.0), (wrong, 0.0)):
            environment = Gsm8k(method)
            await environment.reset(task, 0)
            assert (await environment.step(text)).reward == reward


@pytest.mark.parametrize(
    ("row", "columns", "line"),
    [
        ({"text": "?"}, OF_GSM8K, r"row 1: there is no column 'question' \(data.columns.prompt\), only \['text'\]"),
        ({"question": "?"}, OF_GSM8K, r"row 1: there is no column 'answer' \(data.columns.ground_truth\), only"),
        (GSM8K | {"answer": "5"}, OF_GSM8K, r"row 1, column answer: no answer of the form hashes .* in '5'"),
        (GSM8K | {"answer": "2 + 3 ####"}, OF_GSM8K, r"row 1, column answer: no answer of the form hashes"),
        (MATH | {"solution": None}, OF_MATH, "there is no column 'solution'"),
        (MATH | {"solution": r"\boxed{\frac{1}"}, OF_MATH, r"column solution: no answer of the form boxed"),
        (MATH | {"solution": "none"}, OF_MATH, r"column solution: no answer of the form boxed"),
        (MATH | {"solution": ["\\boxed{5}"]}, OF_MATH, r"column solution: no answer of the form boxed"),
    ],
)  # fmt: skip
def test_a_row_without_its_columns_or_its_answer_is_refused_by_name(
    row: dict[str, Any], columns: ColumnsConfig, line: str, tmp_path: Path
) -> None:
    file = written(tmp_path / "a.jsonl", GSM8K if columns is OF_GSM8K else MATH, row)
    with pytest.raises(UserError, match=rf"^dataset {file}, .*{line.removeprefix('row 1')}"):
        train_file(DataConfig(train=file, columns=columns), EnvConfig(name="gsm8k"), tmp_path / "run", 0)
    assert not list(tmp_path.glob("run/*"))


# -- what is prepared and refused before a run -------------------------------------------------------------------------


def config(*overrides: str) -> Config:
    return load_config([QUICKSTART], ["model.make.hidden_size=64", *overrides])


def test_a_mixture_the_evaluation_sets_and_demonstrations_are_prepared(tmp_path: Path) -> None:
    mixed, held_out = part(tmp_path, "a", 2).path, part(tmp_path, "b", 1).path
    words = ["data.make_rows=null", f"data.mixture={{a: {{path: {mixed}}}}}", f"data.eval={{other: {held_out}}}"]
    words += ["data.eval_make_rows=3", "model.warm_start.demonstrations=8"]
    prepared = prepare(config(*words), tmp_path / "run")
    assert [task.uid for task in prepared.tasks] == ["a/a-0", "a/a-1"]
    assert prepared.eval_files == {"other": held_out, "made": tmp_path / "run" / "data" / "eval.jsonl"}

    def tokens(mode: str) -> int:
        made = config(*words, f"generator.conversation={mode}")
        shown = demonstrations(made.model, made.env, made.generator, made.run.seed, prepared.model_folder)
        return sum(len(row.token_ids) for row in shown)

    assert tokens("inline") < tokens("append"), "the demonstrations follow the configured conversation"


def test_an_unknown_environment_of_a_row_is_refused(tmp_path: Path) -> None:
    write_rows(
        bad := tmp_path / "bad.jsonl", [{"prompt": "?", "env_class": name, "seed": 1} for name in ("lookup", "lokup")]
    )
    for words in ([f"data.train={bad}", "data.make_rows=null"], [f"data.eval.dev={bad}"]):
        with pytest.raises(UserError, match=r"no environment 'lokup'; the nearest is 'lookup'.*first needed by row 1"):
            prepare(config(*words), tmp_path / "run")


def noted(*lengths: int, seen: list[int] | None = None) -> list[str]:
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


def test_prompts_of_a_sample_of_the_rows_that_are_too_long_or_refused_are_counted() -> None:
    assert noted(10, 1) == []
    refused, line = noted(5, 12, 14, 0)
    assert "the prompts of 1 of 4 rows looked at of rows.jsonl are refused (row 3: the template refuses)" in refused
    assert "it is 10, and the prompts of 2 of 4 rows looked at of rows.jsonl are longer (row 1 has 12 tokens)" in line
    for n in (LOOKED_AT, LOOKED_AT + 1, 10 * LOOKED_AT + 1):
        seen: list[int] = []
        (line,) = noted(*[12] * n, seen=seen)
        assert LOOKED_AT / 2 <= len(seen) <= LOOKED_AT and f"{len(seen)} of {len(seen)} rows looked at" in line


@pytest.mark.parametrize("role", ["robot", "developer", "function"])
def test_a_role_that_the_template_does_not_know_is_named_with_its_row_wherever_it_is(
    role: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    roles = ["user"] * (2 * LOOKED_AT) + [role, "user"]
    write_rows(tmp_path / "rows.jsonl", [{"prompt": [{"role": of, "content": "?"}], "seed": 1} for of in roles])
    prepare(config(f"data.train={tmp_path}/rows.jsonl", "data.make_rows=null"), tmp_path / "run")
    said = f"are refused (row {2 * LOOKED_AT}: the chat template names no role '{role}'; use assistant"
    assert said in capsys.readouterr().out


def test_the_validation_and_a_run_note_too_long_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"prompt": "what is the age of fox ?", "extra_info": {"seed": 1}}
    write_rows(tmp_path / "mine.jsonl", [row, {**row, "prompt": "what is the age of the friend of the fox ?"}])
    words = ["data.make_rows=null", f"data.train={tmp_path}/mine.jsonl", "generator.max_input_length=13"]
    validate = ["config", "validate", "--config", QUICKSTART]
    note = "generator.max_input_length: it is 13, and the prompts of 1 of 2 rows"
    for overrides, told in (
        (words, f"note: {note}"),
        (["generator.max_input_length=6"], "rows looked at of train.jsonl"),
    ):
        assert main([*validate, *overrides]) == 0
        assert told in capsys.readouterr().out
    assert main([*validate, *words[:2]]) == 0 and "note:" not in capsys.readouterr().out
    prepare(load_config([QUICKSTART], [*words, "generator.top_p=0.9"]), tmp_path / "run")
    said = capsys.readouterr().out
    assert f"NOTE {note}" in said and "NOTE generator.top_k: set it" in said
