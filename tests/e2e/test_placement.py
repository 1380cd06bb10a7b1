"""The trainer's ranks are placed together, and what a cluster lacks for them is said."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from service.config import load_config

pytestmark = pytest.mark.slow

QUICKSTART = "configs/quickstart.yaml"


def test_ranks_share_a_node_where_they_fit(local_ray: None) -> None:
    import ray
    from ray.util import placement_group_table, remove_placement_group

    from actors.driver.placement import place_ranks, rank_options

    config = load_config([QUICKSTART], ["trainer.ranks=3"])
    room = place_ranks(config, gpus=0)
    try:
        assert room.wait(timeout_seconds=240)
        table = placement_group_table(room)
        assert table["strategy"] == "PACK" and len(set(table["bundles_to_node_id"].values())) == 1

        class Where:
            def node(self) -> str:
                return str(ray.get_runtime_context().get_node_id())

        actors = [
            ray.remote(Where).options(**rank_options(config, 0, room, rank) | {"name": f"where-{rank}"}).remote()
            for rank in range(3)
        ]
        nodes = ray.get([actor.node.remote() for actor in actors], timeout=240)
        assert set(nodes) == set(table["bundles_to_node_id"].values())
    finally:
        remove_placement_group(room)


WHERE = """
import sys, tempfile
import ray
from actors.driver.placement import beside_rank, place_ranks, rank_options
from service.config import load_config

class Where:
    def gpus(self):
        return ray.get_gpu_ids()

config = load_config(["configs/quickstart.yaml"], ["weights.transport=ipc", "trainer.ranks=3", "generator.engines=2"])
with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
    ray.init(address="local", num_cpus=8, num_gpus=3, include_dashboard=False, logging_level="error", _temp_dir=folder)
    room = place_ranks(config, gpus=1)
    where = ray.remote(Where)
    actors = [where.options(**beside_rank(config, room, engine)).remote() for engine in range(2)]
    actors += [where.options(**rank_options(config, 1, room, rank)).remote() for rank in range(3)]
    print(ray.get([actor.gpus.remote() for actor in actors], timeout=60))
    ray.shutdown()
"""


def test_where_weights_go_by_cuda_ipc_each_engine_is_on_the_gpu_of_a_rank() -> None:
    said = subprocess.run([sys.executable, "-c", WHERE], capture_output=True, text=True, timeout=200)
    assert said.returncode == 0, said.stderr
    first, second, *ranks = json.loads(said.stdout.splitlines()[-1])
    assert [first, second] == ranks[:2]
    assert sorted(ranks) == [[0], [1], [2]]


def test_what_the_cluster_lacks_is_named(local_ray: None) -> None:
    from actors.driver.placement import missing_resources, rank_bundle

    config = load_config([QUICKSTART], ["trainer.ranks=2", "trainer.accelerator=H100", "generator.engines=3"])
    assert rank_bundle(config, 1) == {"CPU": 1.0, "GPU": 1.0, "accelerator_type:H100": 0.001}
    assert missing_resources(config, 1) == "5 GPU (it has 0), 0.002 accelerator_type:H100 (it has 0)"
    assert missing_resources(load_config([QUICKSTART]), 0) == ""
    shared = load_config([QUICKSTART], ["weights.transport=ipc", "trainer.ranks=2", "generator.engines=2"])
    assert missing_resources(shared, 1) == "2 GPU (it has 0)"
