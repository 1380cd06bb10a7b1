"""Recipes for models of certain sizes: the bounds of their buffers, their plans, and a run of fakes."""

from pathlib import Path

import pytest

from benchmarks.shapes import model_folder
from service.config import Config, load
from service.config.checks import check, check_bytes
from service.learn.model.hf_config import read_config
from service.learn.model.router_replay import routing_of_model
from tests.pure.config.test_recipes import CONFIGS, SIZED
from tests.sim.report import simulated
from tests.sim.scenario import Scenario, SimulationSettings

GPUS = dict(zip(SIZED, (1, 8, 8, 16, 16, 64), strict=True))


def recipe(name: str, *settings: str) -> Config:
    return load([CONFIGS / f"{name}.yaml"], [*settings]).config


def folder_of(config: Config, parent: Path) -> Path:
    assert config.model.path is not None
    return model_folder(config.model.path.name.removesuffix("-Instruct"), parent)


@pytest.mark.parametrize("name", SIZED)
def test_a_recipe_uses_its_gpus_and_its_buffer_holds_the_routed_experts(name: str, tmp_path: Path) -> None:
    config = recipe(name)
    engines = config.generator.max_engines * config.generator.engine_gpus
    shared = config.weights.transport == "ipc"
    assert (engines if shared else engines + config.trainer.ranks) == GPUS[name]
    check(config)
    check_bytes(config, routing_of_model(read_config(folder_of(config, tmp_path))).token_bytes)


def test_a_run_of_simulated_engines_and_ranks_gets_to_its_last_step() -> None:
    """The buffer's own code with the sizes of the largest recipe; groups, samples and mini-batches are an eighth."""
    config = recipe(SIZED[-1])
    groups, size = config.generator.concurrent_groups // 8, config.trainer.mini_batch_size // 8
    words = (f"generator.concurrent_groups={groups}", f"trainer.mini_batch_size={size}")
    scenario = Scenario(generators=config.generator.max_engines, median_tokens=24, steps=6, sigma=0.5)
    assert simulated(SimulationSettings.of(recipe(SIZED[-1], *words)), scenario, seed=0).steps_per_second > 0
