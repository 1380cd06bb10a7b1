"""Recipes fit the memory of their GPUs, and what does not fit is refused before Ray starts."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from actors.driver.prepare import prepare
from benchmarks.shapes import model_folder
from service.cli.parser import main
from service.config import Config, load
from service.config.rollout import GeneratorConfig
from service.config.tree import SHORT_ANSWER
from service.errors import UserError
from service.learn.model.hf_config import MAX_SHAPE, read_config
from service.plan.engine import check_engine, kv_token_bytes, request_bytes
from service.plan.memory import GPUS, MARGIN, FitSettings, fit
from tests.families.small import small_config

ROOT = Path(__file__).parents[3]
H100 = GPUS["h100"].memory
FOUR_NODES = ROOT / "configs/four_nodes.yaml"
RECIPES = {
    path: load([path]).config
    for path in (*sorted((ROOT / "configs").glob("*.yaml")), ROOT / "deploy/kuberay/job/run.yaml")
    if path != FOUR_NODES
}
ON_GPUS = [path for path, config in RECIPES.items() if config.model.path is not None]
A_MODEL_OF_ONES_OWN = "policy"
"""The model folder of deploy/kuberay/job, whose sizes are for the one below."""
SIZED_FOR = "Qwen3-8B"


def of_recipe(config: Config, parent: Path) -> Path:
    """The folder of a recipe's model, with its config.json only."""
    assert config.model.path is not None
    name = config.model.path.name.removesuffix("-Instruct")
    return model_folder(SIZED_FOR if name == A_MODEL_OF_ONES_OWN else name, parent)


@pytest.mark.parametrize("path", ON_GPUS, ids=lambda path: path.stem)
def test_a_recipe_fits_gpus_of_80_gb_with_a_tenth_to_spare_and_on_four_nodes_too(path: Path, tmp_path: Path) -> None:
    config = RECIPES[path]
    found = fit(FitSettings.of(config), of_recipe(config, tmp_path), H100)
    assert found.problem() is None
    assert found.rank_bytes <= (1 - MARGIN) * 80e9
    if config.trainer.ranks == 4:
        config = load([path, FOUR_NODES]).config
        assert fit(FitSettings.of(config), of_recipe(config, tmp_path), H100).problem() is None


def settings_of(*words: str) -> FitSettings:
    """Settings of a model in bfloat16 with micro-batches of 16,384 tokens."""
    common = ("model.dtype=bfloat16", "trainer.max_tokens_per_micro_batch=16384", "trainer.compile=false")
    return FitSettings.of(load([], [*common, *words]).config)


@pytest.mark.parametrize(
    ("name", "ranks", "checkpointing", "gigabytes"),
    [
        ("Qwen3-0.6B", 1, False, 47.1),
        ("Qwen3-0.6B", 4, True, 7.1),
        ("Qwen3-4B", 8, False, 114.0),
        ("Qwen2.5-7B", 8, True, 26.8),
        ("Qwen3-30B-A3B", 16, True, 43.5),
    ],
)
def test_the_memory_of_a_rank_is_that_of_a_step_whose_tensors_were_counted(
    name: str, ranks: int, checkpointing: bool, gigabytes: float, tmp_path: Path
) -> None:
    settings = settings_of(f"trainer.ranks={ranks}", f"trainer.gradient_checkpointing={checkpointing}")
    assert fit(settings, model_folder(name, tmp_path), H100).rank_bytes / 1e9 == pytest.approx(gigabytes, rel=0.04)


def test_savers_of_memory_save_it(tmp_path: Path) -> None:
    folder, plain = model_folder("Qwen3-8B", tmp_path), ("trainer.ranks=16", "trainer.gradient_checkpointing=true")

    def held(*words: str) -> dict[str, float]:
        return dict(fit(settings_of(*plain, *words), folder, H100).rank)

    whole, offloaded = held(), held("trainer.cpu_offload=true")
    assert not {"weights", "gradients", "optimizer"} & offloaded.keys() and offloaded["gathered"] == whole["gathered"]
    assert held("trainer.shard_within=node")["weights"] == 2 * whole["weights"]
    assert held("trainer.reshard_after_forward=false")["gathered"] > whole["gathered"] + 16e9
    adapter = held("model.lora.rank=16")
    assert adapter["optimizer"] < whole["optimizer"] / 50 and adapter["weights"] < 0.6 * whole["weights"]
    assert sum(held("trainer.compile=true", "trainer.gradient_checkpointing=2").values()) < sum(
        held("trainer.gradient_checkpointing=2").values()
    )


def test_the_experts_of_all_tokens_of_a_step_are_counted(tmp_path: Path) -> None:
    folder, words = model_folder("Qwen3-30B-A3B", tmp_path), ["trainer.ranks=12", "trainer.mini_batch_size=128"]
    words += ["generator.max_input_length=3072", "generator.max_generate_length=1024"]
    assert fit(settings_of(*words), folder, H100).rank["experts"] == 128 * 8 * 4096 / 12 * 48 * 8
    assert not fit(settings_of(*words, "generator.record_experts=false"), folder, H100).rank["experts"]


def test_automatic_checkpointing_is_the_lightest_that_fits(tmp_path: Path) -> None:
    folder, settings = model_folder("Qwen3-4B", tmp_path), settings_of("trainer.ranks=8")
    levels = [fit(settings, folder, gigabytes * 1e9).checkpointing.layers for gigabytes in (160, 80, 30, 1)]
    assert levels == [0, 18, 36, 36]


def test_what_does_not_fit_is_named_with_what_helps(tmp_path: Path) -> None:
    plenty = fit(settings_of("trainer.gradient_checkpointing=false"), model_folder("Qwen3-0.6B", tmp_path), H100)
    assert plenty.problem() is None
    tight = plenty._replace(gpu_bytes=plenty.rank_bytes / (1 - MARGIN) - 1)
    assert (tight.problem() or "").startswith("trainer.ranks: the GPU of a rank needs 41")
    assert "generator.tensor_parallel_size" in (plenty._replace(engine_bytes=80e9).problem() or "")
    assert "generator.gpu_memory_utilization" in (plenty._replace(kv_bytes=1.0).problem() or "")


@pytest.mark.parametrize(
    ("gpus_an_engine", "tokens", "problem"),
    [
        (1, 16384, "generator.tensor_parallel_size: a GPU of an engine needs 68.5 GB and the KV cache of 16384 tokens"),
        (2, 16384, None),
        (2, 1 << 20, "generator.tensor_parallel_size: a GPU of an engine needs 35.8 GB and the KV cache of 1048576"),
        (8, 1 << 20, None),
    ],
)
def test_an_engine_of_32_billion_parameters_needs_two_gpus_or_more_for_longer_requests(
    gpus_an_engine: int, tokens: int, problem: str | None, tmp_path: Path
) -> None:
    settings = settings_of(
        f"generator.tensor_parallel_size={gpus_an_engine}",
        f"generator.max_input_length={tokens // 2}",
        f"generator.max_generate_length={tokens // 2}",
        "trainer.ranks=64",
        "trainer.sequence_parallel=64",
        "trainer.gradient_checkpointing=true",
    )
    found = fit(settings, model_folder("Qwen3-32B", tmp_path), H100).problem()
    assert found is None if problem is None else (found or "").startswith(problem), found


def test_a_model_too_large_is_one_line_of_the_validation(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert validated(model, "model.dtype=float32", "trainer.accelerator=H100") == 0
    _, named, needed, *_ = capsys.readouterr().out.splitlines()
    assert "80 GB of GPU memory (H100, as trainer.accelerator says) and float32; not for a CPU" in named
    assert needed.startswith("memory: the GPU of a rank needs ")
    monkeypatch.setattr("service.run.checkpoints.SLOW_SECONDS", 1e-9)
    for every, slow in ((0, False), (5, True)):
        assert validated(model, "trainer.accelerator=H100", f"trainer.checkpoint_every={every}") == 0
        said = capsys.readouterr().out
        assert (f"MB/s to the disk of {ROOT}" in said and "note: this machine writes " in said) == slow
    monkeypatch.setitem(GPUS, "h100", GPUS["h100"]._replace(memory=1e6))
    assert validated(model, "trainer.accelerator=H100") == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_without_a_gpu_a_recipe_in_float32_has_no_estimate_and_a_cut_of_answers_is_named(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert validated(model, "model.dtype=float32", f"generator.max_generate_length={SHORT_ANSWER}") == 0
    noted, none, fine = capsys.readouterr().out.splitlines()
    assert noted.startswith("note: generator.max_generate_length: every answer is cut after 15 tokens")
    assert none == "memory: not computed for a CPU; with trainer.accelerator=H100, the memory of that GPU"
    assert fine.endswith("fine")
    assert validated(model, "model.dtype=float32", f"generator.max_generate_length={SHORT_ANSWER + 1}") == 0
    assert "note:" not in capsys.readouterr().out


def validated(folder: Path, *more: str) -> int:
    """The exit code of the validation of a configuration that trains the folder's model."""
    words = ["config", "validate", "--config", str(ROOT / "configs/quickstart.yaml")]
    words += ["model.make=null", "model.warm_start=null", f"model.path={folder}", "model.dtype=bfloat16"]
    return main([*words, *more])


ODD: list[dict[str, Any]] = [
    *({name: 0} for name in MAX_SHAPE if "intermediate" not in name),
    *({"num_attention_heads": value} for value in (-1, 10**30, 2.5, True)),
    {"num_hidden_layers": MAX_SHAPE["num_hidden_layers"] + 1},
    {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 64, "head_dim": None, "model_type": "qwen2"},
    {"num_attention_heads": 3},
    {"num_key_value_heads": 8},
    {"head_dim": 31},
    {"rope_parameters": None, "rope_theta": 0},
    {"rope_parameters": {"rope_type": "default", "rope_theta": -1e4}},
    {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 0}},
    {"rms_norm_eps": -1e-6},
    {"rope_parameters": {"rope_type": "default", "rope_theta": "x"}},
    {"hidden_act": "relu"},
    {"num_experts": 2, "num_experts_per_tok": 3, "model_type": "qwen3_moe"},
    {"initializer_range": "x"},
]


@pytest.mark.parametrize("odd", ODD, ids=str)
def test_a_description_that_is_of_no_model_is_refused_in_one_line(
    odd: dict[str, Any], model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | odd))
    code, told = validated(model), capsys.readouterr().err
    assert (code, told.count("\n")) == (2, 1), told
    assert any(reason in told for reason in ("describes", "cannot be trained", "do not belong together"))
    assert "initializer_range" not in odd or "expected float" in told, "what transformers says is told"


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("generator.tensor_parallel_size=3", "3 GPUs cannot divide the model among themselves"),
        ("generator.kv_cache_bytes=1000", "1000 cannot hold one request"),
        (f"trainer.max_tokens_per_micro_batch={10**12}", ""),
    ],
)
def test_what_no_engine_or_gpu_can_hold_is_one_line_of_the_validation(
    setting: str, told: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert validated(model, setting) == 2
    said = capsys.readouterr().err
    assert told in said and setting.partition("=")[0] in said and said.count("\n") == 1


@pytest.mark.parametrize(
    "settings",
    [
        "generator.tensor_parallel_size=3",
        "generator.tensor_parallel_size=16",
        "generator.tensor_parallel_size=3 model.make.hidden_size=192",  # which leaves the rows of its vocabulary
        "generator.kv_cache_bytes=1000",
    ],
)
def test_validation_plan_and_run_refuse_the_same_engines_of_a_made_model(
    settings: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quickstart, words = ROOT / "configs/quickstart.yaml", settings.split()
    with pytest.raises(UserError) as refused:
        prepare(load([quickstart], words).config, tmp_path)
    for command in (["config", "validate"], ["plan"]):
        assert main([*command, "--config", str(quickstart), *words]) == 2
        assert capsys.readouterr().err.endswith(f"{words[0]}: {str(refused.value).partition(': ')[2]}\n")


def test_a_cache_that_holds_one_request_passes_and_fewer_bytes_are_refused_before_ray(
    model: Path, tmp_path: Path
) -> None:
    quickstart = load([ROOT / "configs/quickstart.yaml"]).config
    takes = request_bytes(read_config(model), quickstart.generator, quickstart.model.dtype)
    made = ["model.warm_start=null", f"run.dir={tmp_path}"]
    for size, refused in ((takes, False), (takes - 1, True)):
        config = load([ROOT / "configs/quickstart.yaml"], [*made, f"generator.kv_cache_bytes={size}"]).config
        with pytest.raises(UserError, match=f"takes {takes} bytes") if refused else nullcontext():
            prepare(config, tmp_path / str(size))


def test_each_gpu_of_an_engine_holds_its_part_of_the_key_heads_and_one_at_least(tmp_path: Path) -> None:
    model = read_config(model_folder("Qwen3-8B", tmp_path))
    for gpus, heads in ((1, 8), (2, 4), (16, 1)):
        generator = GeneratorConfig(tensor_parallel_size=gpus)
        check_engine(model, generator, "bfloat16")
        assert kv_token_bytes(model, generator, "bfloat16") == 2 * model.num_hidden_layers * heads * model.head_dim * 2


def test_a_request_of_a_model_with_linear_attention_takes_its_states_besides_the_tokens() -> None:
    model, generator = small_config("qwen3_5"), GeneratorConfig(max_input_length=64, max_generate_length=31)
    state = 4 * 8 * 16 * 4  # value heads, dimensions of keys and values, float32
    linear, full = model.layer_types.count("linear_attention"), model.layer_types.count("full_attention")
    takes = request_bytes(model, generator, "bfloat16") - 128 * kv_token_bytes(model, generator, "bfloat16")
    assert (2 * linear + full) * state < takes < 4 * (2 * linear + full) * state
