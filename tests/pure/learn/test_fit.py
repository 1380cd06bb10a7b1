"""Recipes fit the memory of their GPUs, and what does not fit is refused before Ray starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.estimates import SHAPES, model_folder
from service.cli.parser import main
from service.config import Config, load
from service.learn.estimate.fit import GPU_BYTES, MARGIN, fit
from tests.pure.learn.test_estimate import MICRO_BATCH_TOKENS, configured, folder_of

ROOT = Path(__file__).parents[3]
FOUR_NODES = ROOT / "configs/four_nodes.yaml"
RECIPES = {
    path: load([path]).config
    for path in (*sorted((ROOT / "configs").glob("*.yaml")), ROOT / "deploy/kuberay/job/run.yaml")
    if path != FOUR_NODES
}
ON_GPUS = [path for path, config in RECIPES.items() if config.model.path is not None]
ONE_NODE = [path for path in ON_GPUS if RECIPES[path].trainer.ranks == 4]
A_MODEL_OF_ONES_OWN = "policy"
"""The model folder of deploy/kuberay/job, whose sizes are for the one below."""
SIZED_FOR = "Qwen3-8B"


def of_recipe(config: Config, parent: Path) -> Path:
    """The folder of a recipe's model, with its config.json only."""
    assert config.model.path is not None
    name = config.model.path.name.removesuffix("-Instruct")
    return model_folder(SIZED_FOR if name == A_MODEL_OF_ONES_OWN else name, parent)


@pytest.mark.parametrize("path", ON_GPUS, ids=lambda path: path.stem)
def test_a_recipe_fits_gpus_of_80_gb_with_a_tenth_to_spare(path: Path, tmp_path: Path) -> None:
    config = RECIPES[path]
    found = fit(config, of_recipe(config, tmp_path), GPU_BYTES["H100"])
    print(path.name, *found.lines(), sep="\n  ")
    assert found.problem() is None
    assert found.rank_bytes <= (1 - MARGIN) * 80e9


@pytest.mark.full
@pytest.mark.parametrize("path", ONE_NODE, ids=lambda path: path.stem)
def test_a_recipe_fits_on_four_nodes_too(path: Path, tmp_path: Path) -> None:
    config = load([path, FOUR_NODES]).config
    assert fit(config, of_recipe(config, tmp_path), GPU_BYTES["H100"]).problem() is None


def test_every_shape_that_a_recipe_names_is_there() -> None:
    assert {RECIPES[path].model.path.name.removesuffix("-Instruct") for path in ON_GPUS} <= {  # type: ignore[union-attr]
        *SHAPES,
        A_MODEL_OF_ONES_OWN,
    }


def test_what_does_not_fit_is_named_with_what_helps(tmp_path: Path) -> None:
    config = configured("mixture", 1)
    generator = config.generator.model_copy(update={"max_input_length": 32, "max_generate_length": 32})
    config = config.model_copy(update={"generator": generator})
    plenty = fit(config, folder_of("mixture", tmp_path), GPU_BYTES["H100"])
    assert plenty.problem() is None
    assert plenty.longest < MICRO_BATCH_TOKENS
    tight = replace(plenty, gpu_bytes=plenty.step.peak_bytes / (1 - MARGIN) - 1)
    assert (tight.problem() or "").startswith("trainer.ranks: the GPU of a rank needs 0.1 GB")
    assert replace(plenty, gpu_bytes=plenty.step.peak_bytes / (1 - MARGIN) + 1, engine_bytes=0.0).problem() is None
    states = {part: plenty.step.peak[part] for part in ("weights", "gradients", "optimizer")}
    all_states = replace(plenty, step=replace(plenty.step, peak=states), gpu_bytes=1.0)
    assert "use more trainer.ranks, or trainer.cpu_offload=true" in (all_states.problem() or "")
    all_activations = replace(all_states, step=replace(plenty.step, peak={"activations": plenty.step.peak_bytes}))
    assert "gradient_checkpointing=true" in (all_activations.problem() or "")
    assert "generator.tensor_parallel_size" in (replace(plenty, engine_bytes=80e9).problem() or "")
    assert "generator.gpu_memory_utilization" in (replace(plenty, kv_bytes=1.0).problem() or "")


def test_a_model_too_large_is_one_line_of_the_validation(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["config", "validate", "--config", str(ROOT / "configs/quickstart.yaml")]
    words += ["model.make=null", "model.warm_start=null", f"model.path={model}", "model.dtype=bfloat16"]
    assert main(words) == 0
    assert "estimate: the GPU of a rank needs 0." in capsys.readouterr().out
    monkeypatch.setitem(GPU_BYTES, "H100", 1e6)
    assert main([*words, "trainer.accelerator=H100"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
