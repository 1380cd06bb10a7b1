"""Families are taken because a small model of each is trained as the family's own code computes it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.utils import logging

from service.errors import UserError
from service.learn.attention_layout import Bucket
from service.learn.model import router_replay
from service.model_folder import FAMILIES
from tests.families.__main__ import HEADING, check, family_line
from tests.families.prove import Finding, prove
from tests.families.small import small_config
from tests.pure.learn.varlen import as_on_gpu, use_flash4

PAGE = Path(__file__).parents[3] / "docs" / "models.md"


@pytest.fixture(autouse=True, scope="module")
def quietly() -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def failed(findings: list[Finding]) -> dict[str, str]:
    return {finding.name: finding.reason for finding in findings if not finding.holds}


EACH_KIND = ("qwen3", "qwen3_moe", "gpt_oss", "qwen3_next")
"""Dense, experts, windows with sinks, linear attention."""


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in EACH_KIND else pytest.mark.full) for name in FAMILIES]
)
def test_every_way_to_train_a_family_equals_its_own_code_and_the_page_tells_so(family: str) -> None:
    config = small_config(family)
    findings = prove(config)
    assert not failed(findings)
    assert len(findings) >= 9
    line = family_line(family, config, findings).rpartition("| ")[0].rpartition("| ")[0]
    assert line in PAGE.read_text()


def test_the_page_lists_the_families_that_runs_take_and_no_other() -> None:
    table = PAGE.read_text().partition(HEADING)[2].partition("\n\n")[0]
    assert [line.split("`")[1] for line in table.splitlines()] == list(FAMILIES)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
        ("qwen3", {"use_sliding_window": True, "max_window_layers": 1, "attention_bias": True}),
        ("qwen3_moe", {"use_sliding_window": True, "mlp_only_layers": [1], "norm_topk_prob": True}),
        ("glm4_moe", {"n_group": 4, "topk_group": 2, "use_qk_norm": True, "attention_bias": True}),
        pytest.param("phi3", {"sliding_window": 9, "resid_pdrop": 0.5}, marks=pytest.mark.full),
        pytest.param("granite", {"logits_scaling": 8.0, "residual_multiplier": 0.3}, marks=pytest.mark.full),
        pytest.param("gemma3", {"rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        }}, marks=pytest.mark.full),
    ],
    ids=str,
)  # fmt: skip
def test_what_published_models_set_is_honoured(family: str, settings: dict[str, Any]) -> None:
    sizes = {} if family != "gemma3" else {"text_config": settings}
    assert not failed(prove(small_config(family, **(sizes or settings))))


@pytest.mark.parametrize(
    ("family", "comparison", "reason"),
    [
        ("gemma2", "loads", "attn_logit_softcapping"),
        ("phi", "packed", "its output head has a bias"),
        ("stablelm", "packed", "missing 1 required positional argument: 'packing'"),
    ],
)
def test_a_family_that_cannot_be_trained_is_told_what_fails(family: str, comparison: str, reason: str) -> None:
    assert reason in failed(prove(small_config(family)))[comparison]


def without_window(bucket: Bucket, window: int | None, dtype: torch.dtype, mask: Any = Bucket.mask) -> torch.Tensor:
    found: torch.Tensor = mask(bucket, None, dtype)
    return found


@pytest.mark.parametrize(
    ("family", "place", "name", "broken", "comparisons"),
    [
        ("olmo3", Bucket, "mask", without_window, {"packed", "shared prefixes", "sequence parallel"}),
        ("qwen3_moe", router_replay.RouterReplay, "set", lambda replay, _: replay._recorded.update(
            dict.fromkeys(replay._blocks, torch.zeros(262, 2, dtype=torch.int64))), {"packed"}),
    ],
    ids=["window", "router"],
)  # fmt: skip
def test_the_proof_finds_what_is_broken(
    monkeypatch: pytest.MonkeyPatch, family: str, place: Any, name: str, broken: Any, comparisons: set[str]
) -> None:
    monkeypatch.setattr(place, name, broken)
    assert comparisons <= failed(prove(small_config(family))).keys()


@pytest.mark.parametrize(("family", "flash4"), [("mistral", True), ("gpt_oss", False), ("gpt_oss", True)])
def test_windows_and_sinks_are_those_of_the_family_with_the_kernels_of_a_gpu(
    monkeypatch: pytest.MonkeyPatch, family: str, flash4: bool
) -> None:
    if flash4:
        use_flash4(monkeypatch)
    as_on_gpu(monkeypatch)
    assert not failed(prove(small_config(family)))


def test_a_family_that_nobody_checked_gets_a_line_for_each_comparison_and_each_reason_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small_config("mixtral").save_pretrained(tmp_path)
    assert check(str(tmp_path)) == 1
    said = capsys.readouterr().out
    assert said.split()[0] == "loads" and said.splitlines()[-1].startswith("mixtral ")
    assert said.count("has no weight") == 1 and "padded, shared prefixes" in said and "the same as packed" in said
    assert "the small model has no weight" in said and "baton-proof" not in said and "model.path" not in said


def test_a_folder_with_quantised_weights_is_refused_as_such(tmp_path: Path) -> None:
    config = small_config("qwen3")
    config.quantization_config = {"quant_method": "fp8"}
    config.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="its weights are quantised"):
        check(str(tmp_path))
