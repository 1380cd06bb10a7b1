"""`baton plan`: what does not fit is said, splits use all GPUs, and seconds are those of an arithmetic by hand."""

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.shapes import model_folder
from service.cli.parser import main
from service.config import load
from service.errors import UserError
from service.plan.memory import GPUS, FitSettings
from service.plan.plan_command import DOES_NOT_FIT
from service.plan.splits import MAX_SPLITS, SplitTable, Work

H100 = GPUS["h100"]
WORK = Work(turns=4, prompt=600, response=500, observation=200)
SETTINGS = ["model.dtype=bfloat16", "trainer.ranks=4", "generator.engines=4", "generator.concurrent_groups=64"]
SETTINGS += ["trainer.mini_batch_size=64", "generator.max_input_length=8192", "generator.max_generate_length=1024"]
SETTINGS += ["algorithm.n_samples_per_prompt=8", "trainer.max_tokens_per_micro_batch=16384", "env.max_turns=4"]


def table(folder: Path, *words: str, name: str = "Qwen3-8B") -> SplitTable:
    config = load([], [*SETTINGS, *words]).config
    return SplitTable(FitSettings.of(config), config.buffer, model_folder(name, folder), H100, WORK)


def plan(folder: Path, *words: str, name: str = "Qwen3-8B") -> int:
    return main(["plan", "--config", "configs/gsm8k.yaml", f"model.path={model_folder(name, folder)}", *words])


def test_seconds_are_those_of_an_arithmetic_by_hand(tmp_path: Path) -> None:
    """8.19 billion parameters, 0.62 of them only looked up; 512 trajectories of 3,200 tokens, 2,000 of them sampled."""
    split, active = table(tmp_path, "generator.kv_cache_bytes=70000000000").split(4, 4), 8.19e9 - 151936 * 4096
    flops = 6 * (active + 36 * 4096 * 3200) * 3200 * 512
    assert split.training.fast == pytest.approx(flops / 4 / (0.5 * 989e12), rel=0.01)
    assert split.training.slow == pytest.approx(flops / 4 / (0.3 * 989e12), rel=0.01)
    read = 8.19e9 * 2 + 128 * 1900 * 36 * 2 * 8 * 128 * 2
    seconds = 2000 * (read / (0.8 * 3.35e12) + 0.002) + 512 / 4 * 1200 * 2 * active / (0.5 * 989e12)
    assert split.decoding.fast == pytest.approx(seconds, rel=0.01)
    assert split.step.slow == max(split.training.slow, split.decoding.slow)


def test_what_alternates_takes_the_sum_and_the_kv_room_bounds_the_requests(tmp_path: Path) -> None:
    on_policy = table(tmp_path, "buffer.lookahead=0").split(4, 4)
    assert on_policy.step.fast == pytest.approx(on_policy.training.fast + on_policy.decoding.fast)
    plenty, little = (table(tmp_path, f"generator.kv_cache_bytes={n}000000000").split(4, 4) for n in (60, 5))
    assert little.decoding.fast > 2 * plenty.decoding.fast and little.training == plenty.training


def test_more_engines_decode_faster_and_fewer_ranks_train_slower_and_may_not_fit(tmp_path: Path) -> None:
    splits = table(tmp_path, name="Qwen3-14B").splits(8)
    assert [(split.engines, split.ranks) for split in splits] == [(n, 8 - n) for n in range(1, 8)]
    for fewer, more in pairwise(splits):
        assert more.decoding.fast < fewer.decoding.fast and more.training.slow > fewer.training.slow
    assert splits[0].fits and not splits[-1].fits and splits[0].rank < 0.9 * H100.memory < splits[-1].rank


def test_splits_use_all_gpus_in_whole_engines_and_whole_groups_of_ranks(tmp_path: Path) -> None:
    words = "generator.tensor_parallel_size=2", "trainer.sequence_parallel=2", "generator.engines=1"
    of_groups = table(tmp_path, *words)
    assert {(split.engines, split.ranks) for split in of_groups.splits(8)} == {(1, 6), (2, 4), (3, 2)}
    with pytest.raises(UserError, match="--gpus 7"):
        of_groups.splits(7)
    node = table(tmp_path, "trainer.shard_within=node", "trainer.ranks=8")
    assert {split.ranks for split in node.splits(12)} == {1, 2, 3, 4, 5, 6, 7, 8}
    assert len(table(tmp_path).splits(512)) <= MAX_SPLITS


def test_engines_that_share_the_gpus_of_ranks_alternate_with_them(tmp_path: Path) -> None:
    shared = table(tmp_path, "weights.transport=ipc", "generator.gpu_memory_utilization=0.4", "generator.engines=1")
    assert shared.settings.gpus == 4 and {split.ranks for split in shared.splits(4)} == {4}
    split, *_ = shared.splits(4)
    assert split.step.fast == pytest.approx(split.training.fast + split.decoding.fast)


def test_an_adapter_trains_with_fewer_operations_and_sends_less(tmp_path: Path) -> None:
    whole, adapter = table(tmp_path), table(tmp_path, "model.lora.rank=16")
    assert adapter.split(4, 4).training.fast == pytest.approx(whole.split(4, 4).training.fast * 2 / 3, rel=0.01)
    assert adapter.fit.host["final weights"] < whole.fit.host["final weights"] / 50


def test_the_host_of_a_node_holds_the_states_of_its_ranks_and_the_largest_part_is_named_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 12 ranks of 30B a full node has 8, which copy 31 GB each for a checkpoint."""
    words = "trainer.ranks=12", "trainer.checkpoint_every=20", "trainer.cpu_offload=true"
    found = table(tmp_path, *words, name="Qwen3-30B-A3B").fit
    assert found.host["copies for a checkpoint"] == pytest.approx(12 * 30.5e9 * 8 / 12, rel=0.01)
    assert found.host["offloaded states"] == pytest.approx(16 * 30.5e9 * 8 / 12, rel=0.01)
    assert found.host["two versions of the weights"] == 2 * found.host["final weights"]
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=512e9))
    note = found.host_note() or ""
    assert note.startswith("this host has 512.0 GB of memory") and "first for offloaded states 325" in note
    assert table(tmp_path, "trainer.checkpoint_every=0").fit.host_note() is None


def test_the_page_says_what_fits_what_a_step_has_and_which_split_is_best(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(tmp_path, "--gpus", "8", "--turns", "1", "--response-tokens", "400") == 0
    said = capsys.readouterr().out
    assert "on 8 h100" in said and "it fits" in said and "turns 1, prompt 256 (assumed), response 400)" in said
    assert "journal: " in said and "a weight update: 16 GB" in said and said.count("(configured)") == 1
    assert "rank GB  fits" in said and "the GPU of a rank needs 55.2 GB" in said and " 55.2  yes  (configured)" in said
    (best,) = [line for line in said.splitlines() if line.startswith("* ") and "shortest" not in line]
    assert " yes" in best


def test_what_does_not_fit_has_an_exit_code_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(tmp_path, "--gpu", "l40s", "trainer.ranks=1", name="Qwen3-14B") == DOES_NOT_FIT
    said = capsys.readouterr().out
    assert "it does not fit: trainer.ranks: the GPU of a rank needs" in said and "a checkpoint: 180 GB" in said
    assert plan(tmp_path, "--gpus", "2") == DOES_NOT_FIT
    assert "it does not fit: generator.engines" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--gpu", "h1000"], "--gpu h1000"),
        (["--gpus", "0"], "--gpus"),
        (["--turns", "nan"], "--turns"),
        (["model.path=hf:Qwen/Qwen3-8B"], "hf:Qwen/Qwen3-8B is no folder with config.json, which is enough (docs/plan"),
        (["--response-tokens", "-1"], "--response-tokens"),
        (["generator.max_input_length=1000000"], "generator.max_input_length"),
        (["generator.tensor_parallel_size=7"], "generator.tensor_parallel_size"),
        (["generator.tensor_parallel_size=16", "--gpus", "16"], "an engine takes 16 GPUs of a node"),
    ],
)
def test_wrong_input_is_one_line(
    words: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = plan(tmp_path, *words)
    except SystemExit as ended:
        code = int(ended.code or 0)
    *_, said = capsys.readouterr().err.splitlines()
    assert code == 2 and told in said


def test_a_model_that_the_run_would_make_is_planned_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--config", "configs/quickstart.yaml"]) == 0
    assert "it fits" in capsys.readouterr().out
