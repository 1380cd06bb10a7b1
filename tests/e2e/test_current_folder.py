"""A run that is started in a folder whose files are named like modules of Python, of Ray and of Baton."""

import sys
from pathlib import Path

import pytest

from tests import hostile_folder
from tests.e2e.conftest import ROOT
from tests.waiting import ran

pytestmark = [pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(1000)]

SMALL = [
    "run.max_steps=2", "data.make_rows=null", "data.train=rows.jsonl", "model.warm_start=null", "metrics.port=0",
    "env.name=my_envs:Escape", "env.trusted_modules=[my_envs]", "trainer.mini_batch_size=2", "trainer.ranks=1",
    "generator.concurrent_groups=4",
]  # fmt: skip


def test_a_run_trains_there_and_its_generator_loads_the_standard_library(tmp_path: Path) -> None:
    folder = hostile_folder.make(tmp_path)
    baton = str(Path(sys.executable).with_name("baton"))
    run, variables = ["run", "--config", ROOT / "configs/quickstart.yaml", *SMALL], {"LOADED": str(folder / "loaded")}
    done = ran(baton, *run, folder=folder, seconds=800, PYTHONPATH=str(ROOT), **variables)
    assert done.returncode == 0 and "finished after 2 optimizer steps" in done.stdout, done.stdout + done.stderr
    assert not (folder / "executed").exists(), (folder / "executed").read_text()
    html, current, child = (folder / "loaded").read_text().split("\n")
    assert not Path(html).is_relative_to(folder)
    assert (current, child) == (str(folder), "helped")
