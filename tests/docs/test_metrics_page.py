"""The pages that are made from the code are current."""

import re
from pathlib import Path

import pytest

from scripts.docs import FILES, configuration_page, metrics_page
from service.config.load import key_paths, section_of
from service.config.tree import Config
from service.observe.metrics_table import MEANINGS, TABLE
from service.observe.not_learning import SYMPTOMS


@pytest.mark.parametrize("name", FILES)
def test_a_file_made_from_the_code_is_current(name: str) -> None:
    assert Path(name).read_text() == FILES[name](), "run python -m scripts.docs"


def test_every_metric_and_every_setting_is_on_its_page() -> None:
    metrics, configuration = metrics_page(), configuration_page()
    for metric in TABLE:
        assert f"| `{metric.name}" in metrics
    assert all(f"| `{key}` |" in metrics for key in MEANINGS)
    for path in key_paths():
        text = f"## `{'.'.join(path)}`" if _is_section(path) else f"| `{path[-1]}` |"
        assert text in configuration or f"## `{'.'.join(path)}.<name>`" in configuration, path


def test_every_symptom_of_a_run_that_does_not_learn_has_its_section_in_the_order_in_which_one_looks() -> None:
    sections = re.findall(r"^## (.+)$", Path("docs/not-learning.md").read_text(), re.MULTILINE)
    assert sections == [symptom.name for symptom in SYMPTOMS]


def _is_section(path: tuple[str, ...]) -> bool:
    model = Config
    for key in path:
        section = section_of(model.model_fields[key].annotation)
        if section is None:
            return False
        model = section  # type: ignore[assignment]
    return True
