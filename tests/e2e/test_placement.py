"""Ranks and engines are placed together, all or none, on nodes that have what they need; what is missing is said."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.full]

GPUS = """
import asyncio, tempfile
import ray
from actors.driver.placement import engine_index, engine_options, rank_options, reserve, run_bundles
from service.config import load_config
from service.errors import BatonError

def config(*settings):
    return load_config(["configs/quickstart.yaml"], settings)

with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
    ray.init(address="local", num_cpus=8, num_gpus=7, include_dashboard=False, logging_level="error", _temp_dir=folder)

    class Where:
        def gpus(self):
            return ray.get_gpu_ids()

    for setting in ("weights.transport=ipc", "generator.tensor_parallel_size=2"):
        of = config(setting, "trainer.ranks=3", "generator.engines=2")
        room = asyncio.run(reserve(run_bundles(of, gpus=1), 60, print))
        options = [engine_options(of, 1, room, engine_index(of, engine)) for engine in range(2)]
        options += [rank_options(of, 1, room, rank) for rank in range(3)]
        actors = [ray.remote(Where).options(**each).remote() for each in options]
        print("SAID", ray.get([actor.gpus.remote() for actor in actors], timeout=60))
        for actor in actors:
            ray.kill(actor)
        ray.util.remove_placement_group(room)
    try:
        asyncio.run(reserve(run_bundles(config("trainer.ranks=2", "trainer.accelerator=H100"), gpus=0), 3, print))
    except BatonError as error:
        print("SAID", error)
    ray.shutdown()
"""


def test_engines_are_on_the_gpus_of_ranks_where_weights_go_by_cuda_ipc_and_else_each_part_has_its_own() -> None:
    """On a Ray of its own, whose GPUs are pretended."""
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    done = subprocess.run([sys.executable, "-c", GPUS], capture_output=True, text=True, timeout=400, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    said = [line.removeprefix("SAID ") for line in done.stdout.splitlines() if line.startswith("SAID ")]
    shared, apart, missing = said
    first, second, *ranks = json.loads(shared)
    assert [first, second] == ranks[:2]
    assert len({gpu for (gpu,) in ranks}) == 3
    first, second, *ranks = json.loads(apart)
    assert len(first) == len(second) == 2 and all(len(rank) == 1 for rank in ranks)
    assert len({gpu for gpus in (first, second, *ranks) for gpu in gpus}) == 7
    assert missing.startswith("no room in the Ray cluster for 3 s: ")
    assert "2 x (" in missing and "0.001 accelerator_type:H100" in missing
