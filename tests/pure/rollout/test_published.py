"""Files as they were published: GSM8K, MATH and verl's, read and scored without a converter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from baton.examples.gsm8k import Gsm8k
from service.config import DataConfig, EnvConfig
from service.config.rollout import ColumnsConfig, MixturePart
from service.errors import UserError
from service.rollout.check_inputs import check_inputs
from service.rollout.prompts.dataset import load_tasks
from service.rollout.prompts.files import eval_files, train_file

GSM8K = {"question": "A hen lays 2 eggs, then 3. How many?", "answer": "2 + 3 = <<2+3=5>>5 eggs.\n#### 1,005"}
MATH = {
    "problem": "Half of $1$?",
    "solution": r"It is $\boxed{9}$, or rather $\boxed{\frac{1}{2}}$.",
    "level": "Level 1",
}
VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "2 + 2?"}],
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"index": 7, "split": "train"},
}
OF_GSM8K = ColumnsConfig(prompt="question", ground_truth="answer", answer="hashes", instruction="End with ####.")
OF_VERL = {"data_source": "openai/gsm8k", "index": 7, "split": "train"}
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
        (VERL, None, "flexible", "2 + 2?", "it is 4.0", "5", OF_VERL),
        (VERL, OF_GSM8K, "flexible", "2 + 2?", "4", "5", OF_VERL),
    ],
    ids=["gsm8k", "math", "verl", "verl-among-others"],
)  # fmt: skip
async def test_a_published_file_is_trained_and_evaluated_as_it_is(
    row: dict[str, Any],
    columns: ColumnsConfig | None,
    method: Any,
    prompt: str,
    right: str,
    wrong: str,
    extra: dict[str, Any],
    suffix: str,
    tmp_path: Path,
) -> None:
    file = written(tmp_path / f"a{suffix}", row)
    env = EnvConfig(name="gsm8k", options={"method": method})
    data = DataConfig(train=file, eval={"held_out": file}, columns=columns)
    check_inputs(env, data, 0, False, ())
    mixed = DataConfig(mixture={"part": MixturePart(path=file)}, columns=columns)
    trained, (evaluated,) = (
        train_file(data, env, tmp_path / "run", 0),
        eval_files(data, env, tmp_path / "run", 0).values(),
    )
    for path, uid in (
        (trained, "a-0"),
        (evaluated, "a-0"),
        (train_file(mixed, env, tmp_path / "mixed", 0), "part/a-0"),
    ):
        (task,) = load_tasks(path)
        assert (task.uid, task.prompt[0]["content"], dict(task.extra_info)) == (uid, prompt, extra)
        for text, reward in ((right, 1.0), (wrong, 0.0)):
            environment = Gsm8k(method)
            await environment.reset(task, 0)
            assert (await environment.step(text)).reward == reward


@pytest.mark.parametrize(
    ("row", "columns", "line"),
    [
        ({"text": "?"}, OF_GSM8K, r"row 1: there is no column 'question' \(data.columns.prompt\), only 'text'"),
        ({"question": "?"}, OF_GSM8K, r"row 1: there is no column 'answer' \(data.columns.ground_truth\), only"),
        (GSM8K | {"answer": "5"}, OF_GSM8K, r"row 1, column answer: no answer of the form hashes .* in '5'"),
        (GSM8K | {"answer": "2 + 3 ####"}, OF_GSM8K, r"row 1, column answer: no answer of the form hashes"),
        (MATH | {"solution": None}, OF_MATH.model_copy(update={"answer": "text"}), "no answer of the form text"),
        (MATH | {"solution": r"\boxed{\frac{1}"}, OF_MATH, r"column solution: no answer of the form boxed"),
        (MATH | {"solution": "none"}, OF_MATH, r"column solution: no answer of the form boxed"),
    ],
)  # fmt: skip
def test_a_row_without_its_columns_or_its_answer_is_refused_by_name(
    row: dict[str, Any], columns: ColumnsConfig, line: str, tmp_path: Path
) -> None:
    file = written(tmp_path / "a.jsonl", GSM8K if columns is OF_GSM8K else MATH, row)
    with pytest.raises(UserError, match=rf"^dataset {file}, {line}" if line.startswith("row") else line):
        train_file(DataConfig(train=file, columns=columns), EnvConfig(name="gsm8k"), tmp_path / "run", 0)
    assert not list(tmp_path.glob("run/*"))
