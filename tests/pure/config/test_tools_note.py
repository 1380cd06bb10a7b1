"""An agent's tools that the model's chat template leaves out are named before a run."""

from pathlib import Path

import pytest

from service.model_folder import tools_note


@pytest.mark.parametrize(
    ("template", "is_noted"), [("{{ messages }}", True), ("{% if tools %}{{ tools }}{% endif %}", False), (None, False)]
)
def test_a_template_that_leaves_out_tools_is_noted(tmp_path: Path, template: str | None, is_noted: bool) -> None:
    if template is not None:
        (tmp_path / "chat_template.jinja").write_text(template)
    note = tools_note(tmp_path)
    assert (note is not None) == is_noted
    assert note is None or "does not show tools" in note
