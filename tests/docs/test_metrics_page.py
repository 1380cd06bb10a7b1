"""The pages that are made from the code are current."""

import re
from pathlib import Path

import pytest

from scripts.docs import FILES
from service.observe.not_learning import SYMPTOMS


@pytest.mark.parametrize("name", FILES)
def test_a_file_made_from_the_code_is_current(name: str) -> None:
    assert Path(name).read_text() == FILES[name](), "run python -m scripts.docs"


def test_every_symptom_of_a_run_that_does_not_learn_has_its_section_in_the_order_in_which_one_looks() -> None:
    sections = re.findall(r"^## (.+)$", Path("docs/not-learning.md").read_text(), re.MULTILINE)
    assert sections == [symptom.name for symptom in SYMPTOMS]
