"""`baton sft` refuses wrong input in one line, before Ray is loaded."""

import json
from pathlib import Path

import pytest

from baton.examples import lookup
from service.config import load_config
from service.learn.model.tiny_model import make_model
from service.rollout.chat.tokenizer import load_tokenizer, make_tokenizer
from service.run.preparing.inputs import read_conversations
from tests.pure.conftest import Refused
from tests.pure.learn.builders import SHAPE

ROWS = [{"messages": [{"role": "user", "content": "look fox"}, {"role": "assistant", "content": "17"}]}] * 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("sft") / "model"
    make_tokenizer(folder, lookup.vocabulary())
    tokenizer = load_tokenizer(folder)
    make_model(folder, SHAPE, len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id, seed=0)
    return folder


@pytest.mark.parametrize(
    ("rows", "settings", "why"),
    [
        ([], [], "rows.jsonl: there are no rows"),
        ([*ROWS, {"prompt": "?"}], [], "rows.jsonl, row 3: Object missing required field `messages`"),
        (ROWS, ["model.warm_start={}"], "add model.make=null model.warm_start=null"),
        (ROWS, ["data.train=null", "data.make_rows=8"], "there are no conversations; give a JSONL"),
        (ROWS, ["run.store=s3://bucket/run"], "baton sft uploads nothing"),
        (ROWS, ["data.eval.held=none.jsonl"], "none.jsonl does not exist"),
        (ROWS, ["trainer.ranks=2", "trainer.mini_batch_size=1"], "2 ranks share 1 conversations a step"),
        # more than a buffer could keep for RL
        (ROWS, ["trainer.mini_batch_size=100000", "data.eval.held=none.jsonl"], "none.jsonl does not exist"),
    ],
)
def test_wrong_input_is_one_line_and_code_2(
    model: Path,
    rows: list[object],
    settings: list[str],
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    refused: Refused,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert why in refused("sft", f"model.path={model}", "data.train=rows.jsonl", *settings)
    assert not (tmp_path / "runs").exists()


def test_tokens_that_the_tokenizer_lacks_are_a_note_before_the_training(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (file := tmp_path / "rows.jsonl").write_text(json.dumps(ROWS[0]).replace("17", "zzz"))
    config = load_config([], [f"model.path={model}", f"data.train={file}"])
    read_conversations(config.model, config.data, config.generator)
    assert capsys.readouterr().out.startswith(f"NOTE {file}: 1 of 2 learned tokens are <|unk|>")
