"""A run of a model whose family is unknown is refused with what a check of the family finds."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoConfig

from service import model_folder
from service.errors import UserError
from service.learn.proof import unknown


def refused(folder: Path, model_type: str) -> str:
    AutoConfig.for_model(model_type).save_pretrained(folder)
    with pytest.raises(UserError) as caught:
        unknown.refuse_unknown(folder)
    return str(caught.value)


def test_an_unknown_family_without_what_all_have_is_refused_with_what_it_lacks(tmp_path: Path) -> None:
    line = refused(tmp_path, "falcon")
    assert "'falcon' is none of the" in line and "fails: its configuration lacks" in line


def test_an_unknown_family_that_cannot_be_loaded_is_refused_with_the_comparison_that_fails(tmp_path: Path) -> None:
    assert "a check of it just now fails at 'loads': " in refused(tmp_path, "nemotron")


def test_an_unknown_family_for_which_all_comparisons_hold_is_refused_and_the_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = tuple(name for name in model_folder.FAMILIES if name != "qwen3")
    monkeypatch.setattr(model_folder, "FAMILIES", others)
    monkeypatch.setattr(unknown, "FAMILIES", others)
    assert refused(tmp_path, "qwen3").endswith("a check of it just now finds it trained rightly")


def test_known_families_are_not_checked_again(tmp_path: Path) -> None:
    AutoConfig.for_model("qwen3").save_pretrained(tmp_path)
    unknown.refuse_unknown(tmp_path)
