"""The pages name everything that the code can say, and those that are made from the code are current."""

import dataclasses
import re
from enum import StrEnum
from pathlib import Path

import pytest

from scripts.docs import FILES
from service.config import load_config
from service.config.core_settings import buffer_settings
from service.handoff.buffer_settings import opening
from service.handoff.ledger.events import Fate, GroupState
from service.handoff.steps.wire import ALIGNMENT, DEFLATED, MAGIC, MINI_BATCH, PREFIX, STEP_GROUP, VERSION
from service.handoff.verbs import WaitReason
from service.observe.not_learning import SYMPTOMS
from service.observe.status_document import SCHEMA
from service.rollout.environments.registry import ENVIRONMENTS
from service.types import RefusalReason, Step, TrajectoryEnd

OPERATIONS = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
FORMATS = (Path(__file__).parents[2] / "docs" / "formats.md").read_text()


@pytest.mark.parametrize("words", [Fate, GroupState, RefusalReason, WaitReason])
def test_every_word_of_a_state_is_explained(words: type[StrEnum]) -> None:
    assert [str(word) for word in words if f"`{word}`" not in FORMATS] == []


def test_every_field_of_a_step_and_of_an_end_is_explained() -> None:
    fields = [field.name for field in dataclasses.fields(Step)] + list(TrajectoryEnd._fields)
    assert [name for name in fields if f"`{name}`" not in FORMATS] == []


def test_the_layout_of_a_message_is_the_documented_one() -> None:
    assert f"magic `{MAGIC.decode()}`" in FORMATS
    assert f"{STEP_GROUP} step group, {MINI_BATCH} mini-batch, {DEFLATED} " in FORMATS
    assert f"format version, u16: {VERSION} " in FORMATS
    assert f"| {PREFIX.size}.. | header" in FORMATS and f"multiple of {ALIGNMENT} bytes" in FORMATS
    assert f'"schema": {SCHEMA},' in FORMATS


def test_every_file_of_the_run_folder_is_explained() -> None:
    import service.run.folder

    named = re.findall(r"^([\w.]+/?) {2,}\S", service.run.folder.__doc__ or "", re.MULTILINE)
    assert len(named) >= 7
    assert [name for name in named if f"`{name}`" not in FORMATS] == []


def test_every_setting_that_a_resumption_refuses_is_listed() -> None:
    resuming = OPERATIONS.partition("## Resuming")[2].partition("\n## ")[0]
    begun = opening(buffer_settings(load_config([Path("configs/quickstart.yaml")]), 99), ["uid"], "")
    assert [name for name in begun.settings if name not in resuming] == []


@pytest.mark.parametrize("name", FILES)
def test_a_file_made_from_the_code_is_current(name: str) -> None:
    assert Path(name).read_text() == FILES[name](), "run python -m scripts.docs"


def test_every_setting_has_a_meaning_and_every_environment_is_named() -> None:
    assert [line for line in Path("docs/configuration.md").read_text().splitlines() if line.endswith("||")] == []
    environments = Path("docs/environments.md").read_text()
    assert [name for name in ENVIRONMENTS if f"`{name}`" not in environments] == []


def test_every_symptom_of_a_run_that_does_not_learn_has_its_section_in_the_order_in_which_one_looks() -> None:
    sections = re.findall(r"^## (.+)$", Path("docs/not-learning.md").read_text(), re.MULTILINE)
    assert sections == [symptom.name for symptom in SYMPTOMS]
