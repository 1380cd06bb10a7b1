"""What an agent did, for people: roles, what each call continues, and what its run wrote."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from service.columns import digest
from service.errors import UserError
from service.handoff.ledger.scores import CompleteGroup
from service.handoff.steps.tables import ends_table, steps_table
from service.handoff.steps.values import Role, packed_roles
from service.run.records.trajectories import load_records
from service.trace.tokens import ASIDE, LOSS, tokens_of
from service.trace.trajectories_page import html_page
from service.types import Extension, PolicyVersion, Step, TrajectoryEnd, TrajectoryId
from tests.pure.conftest import Refused
from tests.pure.trajectories.test_trajectories import CONFIG, records

ROLES = [Role.AUX, Role.MAIN, Role.RETRY, Role.MAIN, Role.SUB, Role.UNDELIVERED]
TRANSCRIPT = "$ agent\n\x1b[2J<script>alert(1)</script> \u202e done"


def words(ids: Any) -> list[str]:
    return [f" w{token}" for token in ids]


def agent_record(transcript: str = TRANSCRIPT) -> dict[str, Any]:
    """A title; a conversation of three calls, the second sampled twice, the last lost; a sub-agent."""
    of, one, version = TrajectoryId(7, 0), np.ones(1, np.bool_), np.array([PolicyVersion(1, 0).pack()])
    whole = {0: [1, 50], 1: [2, 51], 2: [2, 51, 9, 52], 3: [2, 51, 9, 53], 4: [3, 54], 5: [2, 51, 9, 53, 9, 55]}
    parents = {2: 1, 3: 1, 5: 3}
    steps = []
    for index, tokens in whole.items():
        before = whole[parents[index]] if index in parents else []
        extends = Extension(parents[index], len(before), digest(np.array(before, np.int32))) if before else None
        own = np.array(tokens[len(before) :], np.int32)
        steps.append(Step(of, "p7", index, own[:-1], own[-1:], np.float32([-0.5]), one, version, extends=extends))
    end = TrajectoryEnd(of, "p7", len(steps), "stop", 1.0, packed_roles(ROLES), transcript.encode())
    (record,) = records(CONFIG, [CompleteGroup(7, "p7", steps_table(steps), ends_table([end]))])
    return dict(json.loads(json.dumps(record)))


def test_a_record_has_the_role_and_the_parent_of_each_step_and_the_transcript() -> None:
    record = agent_record()
    assert [step["role"] for step in record["steps"]] == ROLES
    assert [step["parent"] for step in record["steps"]] == [None, None, 1, 1, None, 3]
    assert [step["trains"] for step in record["steps"]] == [False, True, False, True, True, False]
    assert record["transcript"] == TRANSCRIPT and record["loss_tokens"] == 3
    kinds = [{token.kind for token in tokens_of(step, record, 8, words) if token.logprob} for step in record["steps"]]
    assert kinds == [{ASIDE}, {LOSS}, {ASIDE}, {LOSS}, {LOSS}, {ASIDE}]


def test_the_page_says_what_each_step_continues_and_escapes_the_transcript() -> None:
    page = html_page("run", [agent_record()], 1, 8, words)
    for text in ("step 0: aux, row", "step 1: begins anew, row", "step 2: retry, row", "step 3: continues step 1, row"):
        assert text in page
    assert "transcript</summary>" in page
    assert "<script>alert" not in page and "\\x1b[2J&lt;script&gt;" in page


def test_damaged_lines_are_one_line_that_names_them(tmp_path: Path, refused: Refused) -> None:
    (tmp_path / "config.yaml").touch()
    whole = agent_record()
    for line in ("", "null", "[]", "{broken}", "\udcff", "[" * 100_000, json.dumps(whole)[:-3] + "\x00}"):
        text = f"{json.dumps(whole)}\n{line}\n"
        (tmp_path / "trajectories.jsonl").write_text(text, errors="surrogateescape")
        said = refused("trajectories", "list", tmp_path)
        assert "trajectories.jsonl, line 2" in said and len(said) < 600


@pytest.mark.parametrize("name", ["id", "fate", "reason", "stop_reason", "transcript", "role"])
def test_half_characters_in_a_line_are_shown_escaped_or_refused(name: str, tmp_path: Path) -> None:
    record = agent_record()
    (record["steps"][0] if name == "role" else record)[name] = "half \ud800"
    (tmp_path / "trajectories.jsonl").write_text(json.dumps(record) + "\n")
    try:
        (read,) = load_records(tmp_path)
    except UserError as error:
        assert "line 1" in str(error)
        return
    html_page("run", [read], 1, 8, words).encode()
