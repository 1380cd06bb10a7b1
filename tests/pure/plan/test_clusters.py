"""Plans of several nodes: cards are shared, nothing becomes slower by a jump, and what cannot be is not listed."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.estimates import SHAPES
from service.cli.configuration import _estimates
from service.cli.parser import main
from service.config import load
from service.config.core_settings import worst_bytes
from service.errors import ConfigError
from service.handoff.group_bytes import ITEM_BYTES
from service.learn.estimate.step import StepEstimate
from service.plan.command import DOES_NOT_FIT
from service.plan.forecast import splits_of
from service.plan.machine.costs import CPU, GPU, TRAINER, WEIGHTS, listed
from service.plan.machine.device import profile
from service.plan.settings import PlanSettings
from service.plan.trainer import Trainer
from tests.pure.plan.test_measured import TWO_CORES

H100, BUDGET = profile("h100"), 16384
QUICKSTART = Path(__file__).parents[3] / "configs/quickstart.yaml"


def trainer(billions: float, active: float, within_node: bool = False) -> Trainer:
    """A model of which a token passes through `active` billion parameters."""
    flops = 8e9 * active * BUDGET
    step = StepEstimate(
        parameters=int(billions * 1e9),
        trained=int(billions * 1e9),
        peak={"weights": int(billions * 1e9)},
        flops=flops,
        model_flops=0.75 * flops,
        sent=8e9 * billions,
        seconds={"products": flops / 650e12},
        optimizer_seconds=0.01 * billions,
    )
    return Trainer(step, 8, 1.0, True, BUDGET, 4096, 1.0, within_node)


models = st.sampled_from([(1.7, 1.7), (4.0, 4.0), (8.0, 8.0), (14.8, 14.8), (30.5, 3.3), (235.0, 22.0)])


@given(models, st.integers(2, 256), st.floats(1e5, 1e8), st.booleans())
def test_one_more_rank_makes_no_step_slower_by_a_jump(
    model: tuple[float, float], ranks: int, tokens: float, within_node: bool
) -> None:
    """A ring of n ranks sends (n - 1) / n of the bytes, which is what a rank more may cost; and cards are no NVLink."""
    more = ranks + 1
    if within_node and ranks >= 8:  # in whole nodes
        ranks, more = ranks // 8 * 8, ranks // 8 * 8 + 8
    made = trainer(*model, within_node=within_node)
    fewer_s, more_s = (made.seconds(H100, count, tokens, 4096, BUDGET) for count in (ranks, more))
    growth = (1 - 1 / more) / (1 - 1 / ranks)
    across = 2.0 if within_node and ranks == 8 else 1.06  # from one copy to two, whose gradients have to be added
    assert more_s <= fewer_s * growth * across


def test_a_ring_over_nodes_has_all_network_cards_of_a_node() -> None:
    assert H100.ring(8) == pytest.approx(315e9) and H100.ring(16) == H100.ring(64) == pytest.approx(300e9)
    thirty = trainer(30.5, 3.3)
    gathering = 8 * 30.5e9 * (15 / 16) / 300e9
    no_tokens = thirty.seconds(H100, 16, 0.0, 4096, BUDGET) - 0.5 * thirty.step.optimizer_seconds
    assert no_tokens == pytest.approx(gathering) and 0.7 < gathering < 0.8


def test_with_a_copy_a_node_only_gradients_leave_it() -> None:
    flat, copies = trainer(14.8, 14.8), trainer(14.8, 14.8, within_node=True)
    assert copies.memory(16) == copies.memory(8) == flat.memory(8)
    assert flat.memory(16)["weights"] == flat.memory(8)["weights"] / 2
    added = copies._collectives(H100, 32) - copies._collectives(H100, 8)
    assert added == pytest.approx(2 * (3 / 4) * 4 * 14.8e9 / 8 / H100.network)


def test_a_rank_alone_sends_nothing_but_more_of_them_are_planned_with_what_they_send() -> None:
    alone = replace(trainer(8.0, 8.0), step=replace(trainer(8.0, 8.0).step, sent=0.0), ranks=1)
    assert alone._collectives(H100, 1) == 0
    assert alone._collectives(H100, 8) == trainer(8.0, 8.0)._collectives(H100, 8)


def test_copies_a_node_are_planned_on_whole_nodes_only() -> None:
    words = ["trainer.ranks=16", "trainer.shard_within=node"]
    found = [ranks for _, ranks in splits_of(PlanSettings.of(load([], words).config), 18)]
    assert found == [16, *range(8, 0, -1)]


def test_every_constant_has_a_source_and_the_page_lists_those_of_clusters() -> None:
    assert all(cost > 0 for costs in (CPU, GPU, TRAINER, WEIGHTS) for cost in costs.values())
    text = "\n".join(listed())
    for words in ("8 cards of 50 GB/s a node", "disk: 1 GB/s", "12 bytes a trained parameter", ": assumed"):
        assert words in text


@pytest.fixture
def experts(tmp_path: Path) -> list[str]:
    """The arguments for two layers with experts on 16 GPUs."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["Qwen3-30B-A3B"] | {"num_hidden_layers": 2}))
    words = ["model.make=null", "model.warm_start=null", f"model.path={tmp_path}", "model.dtype=bfloat16"]
    words += ["generator.engines=8", "trainer.ranks=8", "trainer.gradient_checkpointing=true"]
    return ["--config", str(QUICKSTART), *words]


def test_the_journal_has_the_routed_experts_and_ipc_is_no_choice_on_separate_gpus(
    experts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    journal = []
    for more in ([], ["generator.record_experts=false"]):
        assert main(["plan", *experts, *more, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert "ipc" not in found["weights"]
        journal.append(found["journal_bytes"])
    assert main(["plan", *experts]) == 0
    assert "2 to 14 times as long as predicted" in capsys.readouterr().out
    tokens = 16 * 8 * found["work"]["prompt_tokens"]
    assert journal[0] / journal[1] == pytest.approx((17 + 2 * 8) / 17) and journal[1] > 17 * tokens


def test_bounds_that_routed_experts_exceed_are_refused_by_the_plan_and_by_the_check(
    experts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    worst = worst_bytes(load([QUICKSTART], experts[2:]).config)
    without_experts = worst.n_samples * (worst.step + ITEM_BYTES)
    bound = f"buffer.max_group_bytes={without_experts}"
    assert main(["plan", *experts, bound]) == 2
    assert "buffer.max_group_bytes" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"buffer\.max_group_bytes"):
        _estimates(load([QUICKSTART], [*experts[2:], bound]).config)
    assert main(["plan", *experts, bound, "generator.record_experts=false"]) == 0


def test_a_model_too_short_for_the_turns_is_refused_by_the_plan_too(
    experts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["generator.max_input_length=300000", "trainer.max_tokens_per_micro_batch=400000"]
    words += [f"buffer.{name}={1 << 40}" for name in ("max_bytes", "max_group_bytes", "max_journal_bytes")]
    assert main(["plan", *experts, *words]) == 2
    assert "reaches only 262144" in capsys.readouterr().err


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused_by_the_plan_too(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"vocab_size": 3}))
    words = ["--config", str(QUICKSTART), "model.make=null", "model.warm_start=null", f"model.path={model}"]
    assert main(["plan", *words]) == 2
    assert "do not belong together" in capsys.readouterr().err


def test_a_plan_for_a_cpu_that_is_too_small_names_its_memory_and_no_gpus(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.plan.planning.named", lambda name: replace(TWO_CORES, memory=1e9, pace=107.84))
    assert main(["plan", "--config", str(QUICKSTART), "--gpu", "cpu"]) == DOES_NOT_FIT
    page = capsys.readouterr().out
    assert "take 107.8 times as long as usual" in page.partition("\n")[0]
    assert "2 ranks and 1 engines on this machine take" in page and "GPU-hours" not in page
    assert "1*" not in page and not re.search(r" 0\.00\b", page)
