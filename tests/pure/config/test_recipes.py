"""Every configuration that comes with Baton passes `baton config validate`, alone and for several nodes."""

import json
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from baton.examples import harbor_tiny
from service.cli.parser import main
from service.config import Config, load

CONFIGS = Path(__file__).parents[3] / "configs"
OVERLAYS = {"four_nodes.yaml"}
RECIPES = sorted(path.name for path in CONFIGS.glob("*.yaml") if path.name not in OVERLAYS)
SMALL = ("_tiny.yaml", "quickstart.yaml", "one_gpu.yaml", *(name for name in RECIPES if name.startswith("smollm2")))
SIZED = ("lora_8b", "llama31_8b", "qwen3_4b", "qwen3_14b", "qwen3_30b_a3b", "qwen3_30b_a3b_64")
"""Recipes that say how many GPUs a model takes; `test_sized_recipes` has more about them."""
FULL_SIZE = [name for name in RECIPES if not name.endswith(SMALL) and name.removesuffix(".yaml") not in SIZED]


def make_what_it_names(config: Config) -> None:
    """Data where the configuration looks for them, with hardly anything in them; models are another machine's."""
    row = {"prompt": "?", "reward_model": {"ground_truth": "1"}, "db_id": "a"}
    for path in [file for file in (config.data.train, *config.data.eval.values()) if file]:
        assert not path.is_absolute()
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".parquet":
            pq.write_table(pa.Table.from_pylist([row]), path)
        elif not path.suffix:
            harbor_tiny.make_tasks(path, "image")
        else:
            path.write_text(json.dumps({"question": "?", "answer": "#### 1"}))


def validate(names: list[str], settings: list[str]) -> int:
    files = [CONFIGS / name for name in names]
    make_what_it_names(load(files, settings).config)
    return main(["config", "validate", *(word for file in files for word in ("--config", str(file))), *settings])


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_valid_and_a_missing_model_is_one_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert validate([name], []) == 0
    missing = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: model.path: ")]
    assert len(missing) == (load([CONFIGS / name]).config.model.path is not None)


@pytest.mark.parametrize("name", RECIPES)
def test_every_model_that_a_recipe_names_has_a_download_line(name: str) -> None:
    config, page = load([CONFIGS / name]).config, (CONFIGS.parent / "docs/environments.md").read_text()
    assert config.model.path is None or re.search(rf"/{config.model.path.name}[` ]", page)


@pytest.mark.parametrize("name", FULL_SIZE)
def test_a_full_size_recipe_is_valid_on_four_nodes_and_fits_them(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert validate([name, "four_nodes.yaml"], []) == 0
    for nodes, files in ((1, [name]), (4, [name, "four_nodes.yaml"])):
        config = load([CONFIGS / file for file in files]).config
        assert config.trainer.ranks == 4 * nodes
        assert config.generator.engines * config.generator.tensor_parallel_size <= 4 * nodes


# The small recipe of agents plays one within the generator instead of a command.
@pytest.mark.parametrize("name", [name for name in FULL_SIZE if name != "agent_swe.yaml"])
def test_a_full_size_recipe_has_a_small_one_of_the_same_environment(name: str) -> None:
    tiny = load([CONFIGS / name.replace(".yaml", "_tiny.yaml")]).config
    full = load([CONFIGS / name]).config
    assert (tiny.env.name, tiny.env.max_turns > 1) == (full.env.name, full.env.max_turns > 1)
    assert tiny.model.path is None and tiny.data.train is None
