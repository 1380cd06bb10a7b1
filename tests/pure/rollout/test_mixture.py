"""Several datasets in the proportions of their weights."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.config.rollout import DataConfig, EnvConfig, MixturePart
from service.errors import UserError
from service.rollout.prompts.dataset import load_tasks, write_rows
from service.rollout.prompts.files import eval_files, mixed_rows, train_file


def part(folder: Path, name: str, n: int, weight: float = 1.0) -> MixturePart:
    path = folder / f"{name}.jsonl"
    write_rows(path, [{"prompt": f"{name} {i}", "env_class": name} for i in range(n)])
    return MixturePart(path=path, weight=weight)


def sets(rows: list[dict[str, Any]]) -> Counter[str]:
    return Counter(row["uid"].partition("/")[0] for row in rows)


def test_an_epoch_has_every_row_once_and_the_weights_proportions(tmp_path: Path) -> None:
    rows = list(mixed_rows({"a": part(tmp_path, "a", 4, 1.0), "b": part(tmp_path, "b", 2, 3.0)}))
    assert sets(rows) == {"a": 4, "b": 12}
    assert Counter(row["prompt"] for row in rows) == {"a 0": 1, "a 1": 1, "a 2": 1, "a 3": 1, "b 0": 6, "b 1": 6}
    assert len({row["uid"] for row in rows}) == 16
    assert {row["uid"] for row in rows} >= {"a/a-0", "b/b-0", "b/b-0#1", "b/b-1#5"}


def test_datasets_are_evenly_interleaved_for_those_who_do_not_shuffle(tmp_path: Path) -> None:
    rows = list(mixed_rows({"a": part(tmp_path, "a", 4, 1.0), "b": part(tmp_path, "b", 2, 3.0)}))
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
    total = sum(p.weight for p in parts.values())
    found = sets(rows)
    for i, (name, made) in enumerate(parts.items()):
        assert found[name] >= sizes[i]
        assert abs(found[name] - len(rows) * made.weight / total) <= len(parts)
    assert len({row["uid"] for row in rows}) == len(rows)


def test_weights_that_repeat_everything_else_without_end_are_refused(tmp_path: Path) -> None:
    parts = {"a": part(tmp_path, "a", 50, 1e-4), "b": part(tmp_path, "b", 2, 1.0)}
    with pytest.raises(UserError, match=r"data\.mixture\.a\.weight: its 50 rows .* larger weight"):
        list(mixed_rows(parts))


def test_a_bad_row_of_a_mixture_is_named_with_its_file(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\n{"question": "b"}\n')
    with pytest.raises(UserError, match=r"bad\.jsonl, row 1, column prompt"):
        list(mixed_rows({"bad": MixturePart(path=tmp_path / "bad.jsonl")}))


def test_the_training_file_is_the_given_one_or_made_or_mixed(tmp_path: Path) -> None:
    given_part = part(tmp_path, "a", 3)
    assert train_file(DataConfig(train=given_part.path), EnvConfig(), tmp_path, 0) == given_part.path
    mixed = train_file(DataConfig(mixture={"a": given_part}), EnvConfig(), tmp_path / "mixed", 0)
    assert [task.uid for task in load_tasks(mixed)] == ["a/a-0", "a/a-1", "a/a-2"]
    made = train_file(DataConfig(make_rows=5), EnvConfig(), tmp_path / "made", 0)
    assert len(load_tasks(made)) == 5
    again = train_file(DataConfig(make_rows=6), EnvConfig(), tmp_path / "made", 0)
    assert len(load_tasks(again)) == 5  # a resumed run goes on with the same prompts
    with pytest.raises(UserError, match="none of train, make_rows and mixture is set"):
        train_file(DataConfig(), EnvConfig(), tmp_path, 0)


def test_made_evaluation_prompts_are_none_of_the_training_prompts(tmp_path: Path) -> None:
    data = DataConfig(make_rows=200, eval_make_rows=50, eval={"given": part(tmp_path, "a", 3).path})
    trained = {task.extra_info["seed"] for task in load_tasks(train_file(data, EnvConfig(), tmp_path, 0))}
    files = eval_files(data, EnvConfig(), tmp_path, 0)
    assert set(files) == {"given", "made"}
    evaluated = {task.extra_info["seed"] for task in load_tasks(files["made"])}
    assert len(evaluated) == 50
    assert not evaluated & trained
