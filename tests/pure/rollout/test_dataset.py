"""Datasets: columns, defaults, and errors by row and column."""

from __future__ import annotations

import json
import os
import re
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import service.files
from service.config.rollout import ColumnsConfig, DataConfig, EnvConfig
from service.errors import UserError
from service.rollout.chat.tools import read_json
from service.rollout.prompts import rows as prompt_rows
from service.rollout.prompts.dataset import COLUMN_BYTES, load_tasks, rows_digest
from service.rollout.prompts.files import read_published, train_file
from service.rollout.prompts.rows import TASK_BYTES, without_gc, write_rows

PROMPT = [{"role": "user", "content": "6 times 7?"}]
CALLS = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"x": NaN}'}}]}


def written(tmp_path: Path, *rows: Any) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"x": [value]}
    return value


SKYRL = {
    "data_source": "openai/gsm8k",
    "prompt": PROMPT,
    "env_class": "gsm8k",
    "reward_spec": {"method": "rule", "ground_truth": "42"},
    "extra_info": {"split": "train", "index": 7},
}
VERL = {"reward_model" if name == "reward_spec" else name: of for name, of in SKYRL.items() if name != "env_class"}


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize(("row", "env_class"), [(SKYRL, "gsm8k"), (VERL, "")])
def test_the_columns_of_skyrl_and_of_verl_are_understood(
    tmp_path: Path, row: dict[str, Any], env_class: str, suffix: str
) -> None:
    path = tmp_path / f"train{suffix}"
    if suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist([row, row]), path)
    else:
        write_rows(path, [row, row])
    first, second = load_tasks(path)
    assert (first.uid, second.uid) == ("train-0", "train-1")
    assert (first.env_class, list(first.prompt)) == (env_class, PROMPT)
    assert first.reward_spec["ground_truth"] == "42"
    assert first.extra_info["index"] == 7
    assert first.extra_info["data_source"] == "openai/gsm8k"


def test_a_plain_text_is_one_message_of_the_user_in_files_as_other_systems_write_them(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", [{"prompt": "one\u2028two"}])
    (task,) = load_tasks(str(tmp_path / "rows.jsonl"))
    assert list(task.prompt) == [{"role": "user", "content": "one\u2028two"}]
    (tmp_path / "rows.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n  \r\n{"prompt": "b"}')
    assert [task.prompt[0]["content"] for task in load_tasks(tmp_path / "rows.jsonl")] == ["a", "b"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "6 times 7?", "a": 42}, r"column prompt: is missing \(the row has question, a: data\.columns"),
        ({"promt": "6 times 7?"}, r"row 1, column prompt: is missing \(the row has promt: data\.columns"),
        ({"prompt": []}, "row 1, column prompt: is missing"),
        ({"prompt": [{"role": "user", "content": 42}]}, "row 1, column prompt: .0..content"),
        ({"prompt": [{"content": "6 times 7?"}]}, "row 1, column prompt: .0.*role"),
        ({"prompt": PROMPT, "reward_spec": "42"}, "row 1, column reward_spec: .*'42'"),
        ({"prompt": PROMPT, "extra_info": [1]}, r"row 1, column extra_info: .*.1."),
        ({"prompt": PROMPT, "env_class": 3}, "row 1, column env_class: .*not 3"),
        ({"prompt": PROMPT, "uid": "a"}, "row 1, column uid: 'a' is the uid of row 0 too"),
        ({"prompt": PROMPT, "uid": "a" * 513}, "row 1, column uid: .*512"),
        ({"prompt": PROMPT, "temperature": 0}, "row 1, column temperature: .*0.01"),
        ({"prompt": PROMPT, "temperature": 2.1}, "row 1, column temperature: .*2.0"),
        ({"prompt": PROMPT, "temperature": True}, "row 1, column temperature: .*True"),
        (["prompt"], "row 1: a row is an object with columns"),
        ({"prompt": PROMPT, "tools": "[bad"}, "row 1, column tools: no JSON"),
        ({"prompt": PROMPT, "tools": "[" * 100_000}, "row 1, column tools: no JSON"),
        ({"prompt": PROMPT, "tools": ['{"a": NaN}']}, "row 1, column tools: a is NaN"),
        ({"prompt": PROMPT, "extra_info": '{"a": 1, "a": 2}'}, "column extra_info: a is .* a key that comes twice"),
        ({"prompt": PROMPT, "reward_spec": '{"a": 1e400}'}, "column reward_spec: a is .* too large"),
        ({"prompt": json.dumps([PROMPT[0] | {"x": 1e400}])}, r"column prompt: \[0\].x is .* too large"),
        ({"prompt": [PROMPT[0], CALLS, PROMPT[0]]}, "column prompt: arguments.x is NaN"),
        ({"prompt": "half a pair \ud800"}, "row 1, column prompt: holds half a surrogate pair"),
        ({"prompt": [PROMPT[0] | {"content": "\ud800"}]}, "row 1, column prompt: holds half a surr"),
        ({"prompt": [{"role": "human", "content": "a"}]}, """row 1, column prompt: write "role": "user".*'human'"""),
        ({"prompt": '[{"from": "GPT", "value": "a"}]'}, """row 1, column prompt: write "role": "assistant".*'GPT'"""),
        ({"prompt": [{"role": "assistant", "content": "a"}]}, "column prompt: ends with an answer of the assistant"),
        ({"prompt": "a", "level": 1, "extra_info": {"level": 2}}, "column level: differs from .* in extra_info"),
        ({"prompt": [{"role": " User", "content": "a"}]}, """row 1, column prompt: write "role": "user".*' User'"""),
        ({"prompt": [{"role": ["user"], "content": "a"}]}, r"row 1, column prompt: \[0\].role: Expected `str`"),
        ({"prompt": "a", "reward_spec": {"a": 1}, "reward_model": {"a": 2}}, "column reward_model: differs from rew"),
        ({"prompt": PROMPT, "uid": "\ud800"}, "row 1, column uid: holds half a surr"),
        ({"prompt": PROMPT, "env_class": "\ud800"}, "row 1, column env_class: holds half a surr"),
        ({"prompt": PROMPT, "tools": [{"name": "\ud800"}]}, "row 1, column tools: holds half a surr"),
        ({"prompt": PROMPT, "half \ud800": 1}, "row 1, column half \ud800: holds half a surr"),
        ({"prompt": PROMPT, "note": nested(350)}, "column note: is nested too deeply; allowed are 64 levels"),
        ({"prompt": "x" * (COLUMN_BYTES + 1)}, "column prompt: is too large; allowed are 16777216 bytes"),
    ],
)
def test_a_bad_row_is_named_by_row_and_column(tmp_path: Path, row: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_tasks(written(tmp_path, {"prompt": PROMPT, "uid": "a"}, row))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.jsonl", b"", "there are no rows"),
        ("rows.jsonl", b'{"prompt": "a"}\n\n{"prompt', r"row 1: no JSON: .* \(line 3, column 2\)"),
        ("rows.jsonl", b'{"prompt": "a"}\n' + b"[" * 100_000, r"row 1: no JSON: .* \(line 2"),
        ("rows.jsonl", b'{"prompt": "a"}\n' + b"9" * 5_000, r"row 1: no JSON: .* \(line 2"),
        (
            "rows.jsonl",
            b'{"prompt": "a"}\n{"prompt": "a", "x": {"k": 1, "k": 2}}',
            r"row 1: no JSON: x\.k is .* a key that comes twice \(line 2\)",
        ),
        ("rows.jsonl", b'{"prompt": "a", "prompt": null}', "row 0: no JSON: prompt is .* a key that comes twice"),
        ("rows.jsonl", b'{"uid":1,"uid":"\\u0022\\u0022"}', "row 0: no JSON: uid is .* a key that comes twice"),
        ("rows.jsonl", b'{"prompt": "a", "x": [{"y": -1e400}]}', r"x\[0\]\.y is .*too large.* \(line 1\)"),
        ("rows.jsonl", b'{"prompt": "a", "x": NaN}', "row 0: no JSON: x is NaN"),
        ("rows.jsonl", b"\xff\xfe", "not UTF-8"),
        ("rows.parquet", b"no parquet", "no parquet file"),
        ("rows.csv", b"prompt\na\n", "ends in '.csv'; give a .jsonl or a .parquet file"),
    ],
)
def test_a_file_that_is_no_dataset_is_refused(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        load_tasks(path)


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_the_files_of_a_folder_or_of_a_pattern_are_one_data_set_in_the_order_of_their_names(
    tmp_path: Path, form: str
) -> None:
    (hub := tmp_path / "hub" / "data").mkdir(parents=True)
    rows = [{"prompt": f"{number}?", "answer": f"#### {number}" if number < 4 else ""} for number in range(5)]
    for shard, part in (("train-00001-of-00002", rows[3:]), ("train-00000-of-00002", rows[:3])):
        file = hub / f"{shard}.{form}"
        write_rows(file, part) if form == "jsonl" else pq.write_table(pa.Table.from_pylist(part), file)
    (tmp_path / "hub" / "README.md").touch()
    (tmp_path / "hub" / ".cache").mkdir()
    (tmp_path / "hub" / ".cache" / "train.jsonl").touch()
    (hub / "again").symlink_to(tmp_path / "hub")
    for path in (tmp_path / "hub", hub / f"train-*.{form}"):
        assert [task.prompt[0]["content"] for task in load_tasks(path)] == [f"{number}?" for number in range(5)]
        with pytest.raises(UserError, match=rf"train-00001-of-00002\.{form}, row 1, column answer: no answer"):
            read_published(path, ColumnsConfig(ground_truth="answer", answer="hashes"))
    joined = train_file(DataConfig(train=tmp_path / "hub"), EnvConfig(), tmp_path / "run", 0)
    assert [task.uid for task in load_tasks(joined)] == [f"hub-{number}" for number in range(5)]
    (hub / "test-00000-of-00001.jsonl").touch()
    with pytest.raises(UserError, match=rf"several sets; give {hub}/\*test\* or {hub}/\*train\*$"):
        load_tasks(tmp_path / "hub")
    for name in ("gsm8k_train.jsonl", "gsm8k_Test.jsonl"):
        write_rows(tmp_path / "named" / name, rows)
    with pytest.raises(UserError, match="several sets; give"):
        load_tasks(tmp_path / "named")
    (hub / "dataset_info.json").touch()
    for name in ("train-00002.jsonl.gz", "part.JSONL", "train-00002.json", "part.ndjson"):
        (hub / name).touch()
        with pytest.raises(UserError, match=rf"{re.escape(name)} would not be read"):
            load_tasks(tmp_path / "hub")
        (hub / name).unlink()


def test_integers_beyond_doubles_stay_and_what_is_no_number_is_refused_in_both_forms(tmp_path: Path) -> None:
    big = (1 << 53) + 1
    row = {"prompt": "a", "reward_spec": f'{{"n": {big}}}', "x": {"n": big, "none": None}}
    pq.write_table(pa.Table.from_pylist([row]), parquet := tmp_path / "rows.parquet")
    for file in (written(tmp_path, row), parquet):
        (task,) = load_tasks(file)
        assert task.reward_spec == {"n": big} and task.extra_info == {"x": {"n": big}}
    pq.write_table(pa.Table.from_pylist([{"prompt": "null", "x": []}, {"prompt": "a", "x": [float("inf")]}]), parquet)
    with pytest.raises(UserError, match="row 1, column x: holds NaN or infinity; leave the field out"):
        load_tasks(parquet)


def test_what_is_no_file_of_rows_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    for name, why in (("rows.jsonl", "no such file"), ("rows-*", "no such file"), ("pipe.jsonl", "no plain file")):
        with pytest.raises(UserError, match=rf"{re.escape(name)}: .*{why}$"):
            load_tasks(tmp_path / name)


def test_ordinary_bodies_and_rows_with_nulls_are_read_by_the_fast_reader_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, {"prompt": PROMPT, "extra_info": {"a": "null", "b": [{"c": None}]}, "note": None})
    for slow in ("loads", "dumps"):
        monkeypatch.setattr(json, slow, None)
    assert read_json(b'{"a": null}') == {"a": None}
    (task,) = load_tasks(path)
    assert task.extra_info == {"a": "null", "b": [{}]}


def test_half_a_surrogate_pair_elsewhere_is_written_as_it_was_read(tmp_path: Path) -> None:
    path = tmp_path / "again.jsonl"
    write_rows(path, [{"prompt": PROMPT, "extra_info": {"note": "\ud800"}}])
    assert load_tasks(path)[0].extra_info == {"note": "\ud800"}


MAP = pa.map_(pa.string(), pa.int64())


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (pa.array([1 << 62], pa.timestamp("us")), "out of range"),  # dates that Python cannot hold
        (pa.array([1 << 30], pa.date32()), ""),
        (pa.array([5], pa.time64("ns")), ""),
        (pa.array([[("k", 1), ("k", 2)]], MAP), "duplicate key was 'k'"),
        (pa.StructArray.from_arrays([[1], [2]], ["k", "k"]), "duplicate field names"),
    ],
)
def test_a_value_that_python_cannot_hold_is_a_clear_line(tmp_path: Path, value: pa.Array, reason: str) -> None:
    pq.write_table(pa.table({"prompt": ["?"], "when": value}), tmp_path / "rows.parquet")
    with pytest.raises(UserError, match=rf"rows\.parquet: no parquet file that can be read: [^\n]*{reason}[^\n]*$"):
        load_tasks(tmp_path / "rows.parquet")


def test_a_map_of_parquet_is_an_object_and_its_nulls_are_left_out(tmp_path: Path) -> None:
    maps = pa.array([[("k", 1), ("l", None)], None, []], MAP)
    inside = pa.array([{"m": [("k", 2)]}, {"m": None}, None], pa.struct([("m", MAP)]))
    pq.write_table(pa.table({"prompt": ["a", "b", "c"], "extra_info": maps, "x": inside}), tmp_path / "rows.parquet")
    read = [task.extra_info for task in load_tasks(tmp_path / "rows.parquet")]
    assert read == [{"k": 1, "x": {"m": {"k": 2}}}, {"x": {}}, {}]


def test_a_parquet_file_whose_rows_no_memory_holds_or_with_one_column_twice_is_refused_unread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    twice = pa.table([["a"], ["b"]], ["prompt", "prompt"])
    pq.write_table(twice, tmp_path / "rows.parquet")
    with pytest.raises(UserError, match="the column prompt comes twice"):
        load_tasks(tmp_path / "rows.parquet")
    prompts = pa.array(["a" * 100_000] * 1000).dictionary_encode()
    pq.write_table(pa.table({"prompt": prompts}), tmp_path / "rows.parquet")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000 * TASK_BYTES - 1))
    with pytest.raises(UserError, match=r"rows\.parquet.*its 1,000 rows need more memory"):
        load_tasks(tmp_path / "rows.parquet")
    monkeypatch.undo()
    assert len(load_tasks(tmp_path / "rows.parquet")) == 1000
    (limit := tmp_path / "memory.max").write_text(f"{1000 * TASK_BYTES - 1}\n")
    monkeypatch.setattr(service.files, "LIMITS", (limit, tmp_path / "none"))
    with pytest.raises(UserError, match="need more memory"):
        load_tasks(tmp_path / "rows.parquet")
    limit.write_text("max\n")
    assert len(load_tasks(tmp_path / "rows.parquet")) == 1000
    with pytest.raises(UserError, match="need more memory than is free"), without_gc():
        raise MemoryError


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": "6 times 8?"}, {"reward_spec": {"ground_truth": "48"}}, {"level": 2}, {"env_class": "gsm8k"},
        {"temperature": 0.5}, {"tools": [{"name": "calculator"}]}, {"uid": "other"},
    ],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_the_digest_of_rows_changes_with_their_content_and_order_alone(tmp_path: Path, change: dict[str, Any]) -> None:
    first, second = {"prompt": "6 times 7?", "level": 1, "split": "train"}, {"prompt": "1 + 1?"}
    digest = rows_digest(load_tasks(written(tmp_path, first, second)))
    turned = dict(reversed(first.items()))
    assert rows_digest(load_tasks(written(tmp_path, turned, second))) == digest
    assert rows_digest(load_tasks(written(tmp_path, first | change, second))) != digest
    assert rows_digest(load_tasks(written(tmp_path, second, first))) != digest


CALL = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": {"query": "x"}}}
TALK = [
    {"role": "user", "content": "hi", "name": "Ann"},
    {"role": "assistant", "content": "", "tool_calls": [CALL], "reasoning_content": "look", "other": 1},
    {"role": "tool", "content": "17", "tool_call_id": "c1", "name": "find"},
]


def tool(name: str, **properties: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"properties": properties}}}


UNLIKE = [
    {"prompt": TALK, "tools": [tool("find", q={"type": "string"}), tool("add", a={"n": [1]})], "reward_spec": {"a": 1}},
    {"prompt": [TALK[0]], "extra_info": {"x": {"y": 2}}, "reward_spec": {"b": [{"c": 1}, {"d": None}]}, "level": 3},
]


@pytest.mark.parametrize("in_json", [False, True])
def test_rows_from_parquet_and_from_json_texts_are_the_rows_of_jsonl(tmp_path: Path, in_json: bool) -> None:
    plain = load_tasks(written(tmp_path, *UNLIKE))
    assert list(plain[0].prompt) == TALK
    assert plain[0].tools == tuple(UNLIKE[0]["tools"])
    assert plain[1].extra_info == {"x": {"y": 2}, "level": 3}
    assert plain[1].reward_spec == {"b": [{"c": 1}, {}]}
    rows = [{name: json.dumps(of) if in_json else of for name, of in row.items()} for row in UNLIKE]
    columns = {name: [row.get(name) for row in rows] for name in {**rows[0], **rows[1]}}
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet")
    read = load_tasks(tmp_path / "rows.parquet")
    if in_json:
        plain[1].reward_spec["b"][1]["d"] = None  # an object in a text is not changed
        plain[1].extra_info["level"] = "3"  # type: ignore[index]
    assert read == plain


@pytest.mark.parametrize("form", ["messages", "json", "parquet"])
def test_a_message_that_calls_tools_needs_no_content(tmp_path: Path, form: str) -> None:
    called = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    talk = [TALK[0], called, {"role": "tool", "content": "21 C"}]
    row = {"prompt": json.dumps(talk) if form == "json" else talk}
    path = written(tmp_path, row)
    if form == "parquet":
        pq.write_table(pa.Table.from_pylist([row]), path := tmp_path / "rows.parquet")
    (task,) = load_tasks(path)
    assert list(task.prompt) == [TALK[0], called | {"content": ""}, talk[2]]
    with pytest.raises(UserError, match=r"column prompt: \[0\]: .*content"):
        load_tasks(written(tmp_path, {"prompt": [{"role": "user", "content": None}]}))


@pytest.mark.parametrize(
    "begins",
    [
        "[{'role': 'user', 'content': 'hi'}]", '[{"role": "user"', '[{"from": "human", "value": "hi"}]',
        json.dumps(json.dumps([{"role": "user", "content": "hi"}])),
    ],
)  # fmt: skip
def test_a_text_that_is_meant_as_messages_is_never_the_users_text(tmp_path: Path, begins: str) -> None:
    with pytest.raises(UserError, match="row 0, column prompt"):
        load_tasks(written(tmp_path, {"prompt": begins}))
    for text in ("[1, 2]", "{x}", '[{"a": 1}]', "[INST]"):
        (task,) = load_tasks(written(tmp_path, {"prompt": text}))
        assert list(task.prompt) == [{"role": "user", "content": text}]


@pytest.mark.parametrize("nested", [False, True])
def test_a_text_that_parquet_stores_once_for_many_rows_is_kept_once(
    tmp_path: Path, nested: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(prompt_rows, "SLOW_BYTES", 2000 * 100_000)
    text = "a" * 100_000
    prompt: Any = [{"role": "user", "content": text}] if nested else text
    table = pa.table({"prompt": [prompt] * 100})
    if not nested:
        table = table.set_column(0, "prompt", table["prompt"].dictionary_encode())
    with pq.ParquetWriter(tmp_path / "rows.parquet", table.schema) as file:
        for _ in range(20):
            file.write_table(table)
    tracemalloc.start()
    tasks = load_tasks(tmp_path / "rows.parquet")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(tasks) == 2000 and tasks[-1].prompt[0]["content"] == text
    assert peak < 60 << 20
    assert [line.partition(": ")[2] for line in caplog.messages] == [
        "reading its 2000 rows, about 0 GiB, takes minutes"
    ]
