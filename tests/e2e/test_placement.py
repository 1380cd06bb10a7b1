"""Ranks and engines are placed together, all or none, and what a cluster lacks for them is said."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys

import pytest

from service.config import load_config

pytestmark = pytest.mark.slow

QUICKSTART = "configs/quickstart.yaml"


def test_ranks_and_engines_share_a_node_where_they_fit(local_ray: None) -> None:
    import ray
    from ray.util import placement_group_table, remove_placement_group

    from actors.driver.placement import engine_index, engine_options, rank_options, reserve, run_bundles

    config = load_config([QUICKSTART], ["trainer.ranks=2", "generator.engines=1"])
    room = asyncio.run(reserve(run_bundles(config, gpus=0), 240, print))
    try:
        table = placement_group_table(room)
        assert table["strategy"] == "PACK" and len(set(table["bundles_to_node_id"].values())) == 1

        class Where:
            def node(self) -> str:
                return str(ray.get_runtime_context().get_node_id())

        options = [rank_options(config, 0, room, rank) | {"name": f"where-{rank}"} for rank in range(2)]
        options.append(engine_options(config, 0, room, engine_index(config, 0)))
        actors = [ray.remote(Where).options(**each).remote() for each in options]
        nodes = ray.get([actor.node.remote() for actor in actors], timeout=240)
        assert set(nodes) == set(table["bundles_to_node_id"].values())
    finally:
        remove_placement_group(room)


def test_a_run_that_no_cluster_of_this_size_can_hold_ends_with_what_is_missing(local_ray: None) -> None:
    from actors.driver.placement import reserve, run_bundles
    from service.errors import RunFailed

    config, said = load_config([QUICKSTART], ["trainer.ranks=2", "trainer.accelerator=H100"]), list[str]()
    with pytest.raises(RunFailed, match=r"no room in the Ray cluster for 3 s: .* 2 x \(.*0.001 accelerator_type:H100"):
        asyncio.run(reserve(run_bundles(config, gpus=0), 3, said.append))
    assert len(said) == 1 and said[0].startswith("WAITING for room in the Ray cluster, for ")


WHERE = """
import asyncio, sys, tempfile
import ray
from actors.driver.placement import engine_index, engine_options, rank_options, reserve, run_bundles
from service.config import load_config

class Where:
    def gpus(self):
        return ray.get_gpu_ids()

with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
    ray.init(address="local", num_cpus=8, num_gpus=7, include_dashboard=False, logging_level="error", _temp_dir=folder)
    for setting in sys.argv[1:]:
        config = load_config(["configs/quickstart.yaml"], [setting, "trainer.ranks=3", "generator.engines=2"])
        room = asyncio.run(reserve(run_bundles(config, gpus=1), 60, print))
        options = [engine_options(config, 1, room, engine_index(config, engine)) for engine in range(2)]
        options += [rank_options(config, 1, room, rank) for rank in range(3)]
        actors = [ray.remote(Where).options(**each).remote() for each in options]
        print("GPUS", ray.get([actor.gpus.remote() for actor in actors], timeout=60))
        for actor in actors:
            ray.kill(actor)
        ray.util.remove_placement_group(room)
    ray.shutdown()
"""


def test_engines_are_on_the_gpus_of_ranks_where_weights_go_by_cuda_ipc_and_else_each_part_has_its_own() -> None:
    settings = ["weights.transport=ipc", "generator.tensor_parallel_size=2"]
    said = subprocess.run([sys.executable, "-c", WHERE, *settings], capture_output=True, text=True, timeout=240)
    assert said.returncode == 0, said.stderr
    shared, apart = (json.loads(line[5:]) for line in said.stdout.splitlines() if line.startswith("GPUS "))
    first, second, *ranks = shared
    assert [first, second] == ranks[:2]
    assert len({gpu for (gpu,) in ranks}) == 3
    first, second, *ranks = apart
    assert len(first) == len(second) == 2 and all(len(rank) == 1 for rank in ranks)
    assert len({gpu for gpus in (first, second, *ranks) for gpu in gpus}) == 7
