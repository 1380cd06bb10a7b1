"""Completed trajectories as records and as something to look at."""

import json
from collections.abc import Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from service.cli.parser import main
from service.columns import digest
from service.config import Config, load_config
from service.config.core_settings import batch_settings
from service.errors import UserError
from service.files import LOCK
from service.handoff.batches.batch import form_mini_batch
from service.handoff.ledger.scores import CompleteGroup
from service.handoff.ledger.state import VersionHistory
from service.handoff.steps.tables import ends_table, steps_table
from service.rollout.chat.tokenizer import make_tokenizer
from service.run.records.trajectories import (
    RecordSettings,
    describe_ends,
    find_recorded_run,
    load_records,
    trajectory_records,
)
from service.run.records.writer import RunWriter
from service.trace.tokens import LOSS, MASKED, PROMPT, STALE, pieces, step_line, tokens_of
from service.trace.trajectories_command import print_list
from service.trace.trajectories_page import html_page
from service.types import NO_VERSION, Extension, MiniBatch, PolicyVersion, Step, TrajectoryEnd, TrajectoryId
from tests.pure.conftest import Refused
from tests.pure.handoff import worlds


def step(trajectory: TrajectoryId, index: int, prompt: list[int], response: list[int], version: int) -> Step:
    """A step whose last response token was appended by code."""
    sampled = np.arange(len(response)) < len(response) - 1
    return replace(
        worlds.step(index, prompt, response, trajectory=trajectory, uid=f"p{trajectory.group_id}"),
        logprobs=np.where(sampled, np.float32(-0.5), np.float32(0)),
        loss_mask=sampled,
        versions=np.where(sampled, PolicyVersion(1, version).pack(), NO_VERSION),
    )


def group(group_id: int, n: int = 2) -> CompleteGroup:
    """Sample s of the group: two merging steps, and return s."""
    steps, ends = [], []
    for sample in range(n):
        one = TrajectoryId(group_id, sample)
        steps += [step(one, 0, [1, 2], [10, 11, 3], 0), step(one, 1, [1, 2, 10, 11, 3, 4], [20 + sample, 3], 1)]
        ends.append(TrajectoryEnd(one, f"p{group_id}", 2, "stop", float(sample)))
    return CompleteGroup(group_id, f"p{group_id}", steps_table(steps), ends_table(ends))


SIZES = ["algorithm.n_samples_per_prompt=2", "trainer.mini_batch_size=2", "trainer.ranks=1"]
CONFIG = load_config([], [*SIZES, "buffer.max_staleness=8", "run.trajectories_per_step=3"])
ALL = CONFIG.model_copy(update={"run": CONFIG.run.model_copy(update={"trajectories_per_step": 50})})


def formed(groups: list[CompleteGroup], config: Config = CONFIG) -> MiniBatch:
    history = VersionHistory()
    for number in range(2):
        history.publish(PolicyVersion(1, number))
    return form_mini_batch(1, groups, history, batch_settings(config))


GROUPS = [group(7), group(5)]


def records(config: Config = CONFIG, groups: list[CompleteGroup] = GROUPS) -> list[dict[str, Any]]:
    return recorded(formed(groups, config), groups, config)


def recorded(batch: MiniBatch, groups: list[CompleteGroup], config: Config) -> list[dict[str, Any]]:
    return trajectory_records(batch, groups, PolicyVersion(1, 1), RecordSettings.of(config))


def test_a_record_says_what_was_generated_and_what_became_of_it() -> None:
    first, *_, last = records(ALL)
    assert (first["id"], last["id"]) == ("group=7/sample=0/attempt=0", "group=5/sample=1/attempt=0")
    assert (last["return"], last["fate"], last["optimizer_step"], last["trained_at"]) == (1.0, "trained", 2, "1:1")
    assert last["advantage"] > 0 > first["advantage"]
    assert (last["rows"], last["sampled_tokens"], last["loss_tokens"]) == (1, 3, 3)
    one, two = last["steps"]
    assert (one["response_ids"], one["loss_mask"], one["versions"]) == ([10, 11, 3], [1, 1, 0], [(2, "1:0"), (1, None)])
    assert (two["row"], two["versions"][0]) == (0, (1, "1:1"))
    assert json.loads(json.dumps(last)) == json.loads(json.dumps(last, allow_nan=False))


def test_turns_with_advantages_of_their_own_and_what_scorers_said_are_shown() -> None:
    config = ALL.model_copy(
        update={"algorithm": CONFIG.algorithm.model_copy(update={"credit": "return_to_go", "returns": "sum"})}
    )
    batch = formed(GROUPS, config)
    assert batch.turn_advantage_X is not None
    batch = replace(batch, turn_advantage_X=np.arange(8, dtype=np.float32))
    made = recorded(batch, GROUPS, config)
    assert [[step["advantage"] for step in record["steps"]] for record in (made[0], made[-1])] == [[0, 1], [6, 7]]
    made[-1]["scores"] = {
        "judge": {"reward": 0.5, "info": "brief", "fallback": ""},
        "late": {"reward": None, "info": "", "fallback": "deadline"},
        "teacher": {"reward": None, "info": "", "fallback": ""},
    }
    page = html_page("run", [made[-1]], 1, 8, letters)
    for text in ("judge: reward 0.5, brief", "late: no good answer (deadline)", "advantage +7.000", "mean advantage"):
        assert text in page


def test_a_prompt_that_begins_like_that_of_an_earlier_step_says_what_was_left_out() -> None:
    one = TrajectoryId(7, 0)
    shared = Extension(0, 2, digest(np.array([1, 2], np.int32)))
    steps = [step(one, 0, [1, 2], [10, 11, 3], 0), replace(step(one, 1, [9], [20, 3], 0), extends=shared)]
    groups = [CompleteGroup(7, "p7", steps_table(steps), ends_table([TrajectoryEnd(one, "p7", 2, "stop", 1.0)]))]
    (record,) = records(CONFIG, groups)
    assert [made["begins_as"] for made in record["steps"]] == [None, (0, 2)]
    assert step_line(record["steps"][1]).startswith("begins anew, ")
    assert step_line(record["steps"][1]).endswith("stop, begins with the first 2 tokens of step 0")


def test_as_many_are_kept_as_the_configuration_says_and_others_in_each_step() -> None:
    for per_step, kept in ((0, 0), (1, 1), (3, 3), (50, 4)):
        config = CONFIG.model_copy(update={"run": CONFIG.run.model_copy(update={"trajectories_per_step": per_step})})
        assert len({record["id"] for record in records(config)}) == kept
    batch = formed(GROUPS)
    first = {recorded(replace(batch, lease=n), GROUPS, CONFIG)[0]["id"] for n in range(30)}
    assert len(first) > 1


def test_a_prompt_that_was_too_long_is_counted_apart_from_a_trajectory_that_grew_too_long() -> None:
    grown, too_long = {"stop_reason": "length", "steps": [{}]}, {"stop_reason": "length", "steps": []}
    assert describe_ends([too_long, grown, too_long]) == (
        "2 length before the first turn (the prompt exceeds generator.max_input_length), 1 length"
    )
    assert describe_ends([]) == ""


def test_steps_that_do_not_merge_are_shown_as_rows_of_their_own() -> None:
    config = CONFIG.model_copy(update={"buffer": CONFIG.buffer.model_copy(update={"merge": "off"})})
    record = records(config)[0]
    assert record["rows"] == 2 and [one["row"] for one in record["steps"]] == [0, 1]


def letters(token_ids: Sequence[int]) -> list[str]:
    return [f"<{token}>" for token in token_ids]


def test_every_token_is_shown_as_the_trainer_treats_it() -> None:
    record = json.loads(json.dumps(records()[0]))
    kinds = [token.kind for token in tokens_of(record["steps"][0], record, 8, letters)]
    assert kinds == [PROMPT, PROMPT, LOSS, LOSS, MASKED]
    kinds = [token.kind for token in tokens_of(record["steps"][0], record, 0, letters)]
    assert kinds == [PROMPT, PROMPT, STALE, STALE, MASKED]


def test_what_a_token_adds_keeps_its_spaces() -> None:
    def decode(ids: Sequence[int]) -> str:
        return " ".join(["look", "up", "ant", "age", "now", "then"][i] for i in ids)

    assert "".join(pieces(decode, [0, 1, 2, 3, 4, 5])) == "look up ant age now then"


@pytest.mark.parametrize("width", [80, 120])
def test_a_list_holds_its_width_and_steers_no_terminal(width: int) -> None:
    steers, record = "\x1b]0;owned\x07 \x9b2J \u202e\r", records()[0]
    lost = {**record, "id": "group=100812/sample=13/attempt=2", "fate": "filtered", "reason": "zero_variance"}
    odd = {**record, "id": steers, "fate": steers, "reason": steers, "stop_reason": steers}
    output = StringIO()
    print_list(Console(file=output, width=width, force_terminal=False), [lost, odd, *records()], 812)
    shown = output.getvalue()
    assert max(map(len, shown.splitlines())) <= width
    for text in (lost["id"], "3/3", "stop", "the newest 5 of 812 kept trajectories"):
        assert text in shown
    assert "owned" in "".join(shown.split()) and not {"\x1b", "\x07", "\x9b", "\u202e", "\r"} & set(shown)


def test_the_page_needs_nothing_from_outside_and_escapes_what_models_say() -> None:
    page = html_page(
        "<run>", json.loads(json.dumps(records())), 812, 8, lambda ids: ["<script>alert(1)</script>"] * len(ids)
    )
    assert page.count("<script") == 1 and "&lt;script&gt;" in page and "<h1>&lt;run&gt;</h1>" in page
    assert "of 3 on this page; the run kept 812" in page
    assert "://" not in page and 'class="loss" title="log-probability -0.500, weights of step 0"' in page


def test_a_run_without_trajectories_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"neither a run folder \(with config.yaml\) nor the name of a run"):
        find_recorded_run("nobody", tmp_path)
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "config.yaml").write_text("")
    (tmp_path / "r" / LOCK).touch()
    with pytest.raises(UserError, match=r"the name of a run in .*/; did you mean r\?$"):
        find_recorded_run("rr", tmp_path)
    with pytest.raises(UserError, match="has kept no trajectories"):
        find_recorded_run("r", tmp_path)


def test_the_commands_read_a_run_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunWriter(tmp_path / "r")
    (folder.path / "config.yaml").touch()
    folder.append_trajectories(records())
    ids = [record["id"] for record in records()]
    assert [record["id"] for record in load_records(find_recorded_run("r", tmp_path))] == ids
    assert main(["trajectories", "list", str(tmp_path / "r"), "--last", "2"]) == 0
    assert capsys.readouterr().out.count("group=") == 2
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").symlink_to(tmp_path)
    assert main(["trajectories", "list"]) == 0 and capsys.readouterr().out.count("group=") == 3
    said = refused("trajectories", "list", tmp_path / "none")
    assert "neither a run folder (with config.yaml) nor the name of a run" in said
    with pytest.raises(SystemExit):
        main(["trajectories", "list", str(tmp_path / "r"), "--last", "0"])


def test_showing_a_trajectory_takes_the_tokenizer_of_its_run(tmp_path: Path, refused: Refused) -> None:
    RunWriter(tmp_path).append_trajectories(records())
    (tmp_path / "config.yaml").write_text("run: {name: r}\n")
    export = ["trajectories", "export-html", str(tmp_path)]
    assert "tokenizer.json: no such file" in refused(*export)
    make_tokenizer(tmp_path / "model", [f"w{number}" for number in range(30)])
    assert main(export) == 0
    assert "w2" in (tmp_path / "trajectories.html").read_text()
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    assert "no tokenizer can be read from" in refused(*export)
