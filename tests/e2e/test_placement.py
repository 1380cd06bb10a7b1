"""Ranks and engines are placed together, all or none, on nodes that have what they need; what is missing is said."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from service.config import load_config

pytestmark = pytest.mark.slow

GPUS = """
import asyncio, os, tempfile
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
        os.environ["RAY_ADDRESS"] = "a cluster may still grow"
        asyncio.run(reserve(run_bundles(config("trainer.ranks=2", "trainer.accelerator=H100"), gpus=0), 3, print))
    except BatonError as error:
        print("SAID", error)
    ray.shutdown()
"""


RECIPES = """
import os
os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_raylet_start_wait_time_s": "120"}
os.environ["RAY_prestart_worker_first_driver"] = "0"  # each node would start as many workers as it has CPUs
import asyncio, atexit, json, sys, tempfile
from pathlib import Path
from types import SimpleNamespace
import actors
import ray
from ray.cluster_utils import Cluster

folder = tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True)
atexit.register(folder.cleanup)
ray._private.utils.get_dashboard_dependency_error = lambda: "none of the nodes needs one"  # whose agents take seconds
ray._private.utils.write_ray_address = lambda address: None  # into a folder that a new machine lacks
node = {"num_cpus": 8, "num_gpus": 8, "include_log_monitor": False, "resources": {"accelerator_type:H100": 1}}
head = {**node, "include_dashboard": False, "temp_dir": folder.name}
nodes = Cluster(initialize_head=True, head_node_args=head)
atexit.register(nodes.shutdown)
for _ in range(7):
    nodes.add_node(wait=False, **node)
from actors.driver import cluster  # takes as long as the nodes
from actors.driver.placement import reserve, run_bundles
from ray.util.placement_group import placement_group_table, remove_placement_group
from service.config import load_config

class First:
    # coroutines: an actor of thousands of calls would else have as many threads
    def __init__(self, *arguments):
        pass

    async def life(self):
        return SimpleNamespace(process=ray.get_runtime_context().get_actor_id())

    async def place(self):
        return ray.get_runtime_context().get_node_id(), ("", 0)

    async def load(self, *arguments):
        pass

    async def start(self):
        return ray.get_runtime_context().get_node_id(), len(ray.get_gpu_ids())

for part in ("TrainerRank", "Generator", "BufferActor", "MetricsHub"):
    setattr(cluster, part, type(part, (First,), {}))
cluster.check_nodes = lambda *nothing: None  # which would look for the GPUs
cluster.RunFiles = SimpleNamespace(of=lambda *nothing: None)
cluster.PolicySize = SimpleNamespace(of_folder=lambda *nothing: SimpleNamespace(elements=0))

def started(of, folder):
    prepared = SimpleNamespace(model_folder=folder, tasks_file=folder, eval_files={}, vocab_size=9, routing=None)
    prepared.base = folder
    run = cluster.place_actors(of, prepared, folder / "journal")
    asyncio.run(run.trainer.load(folder))
    engines = ray.get([actor.start.remote() for actor in (*run.generators, run.buffer, run.hub)], timeout=200)
    return run.trainer.nodes + [node for node, _ in engines], [gpus for _, gpus in engines]

def placed(of):
    room = asyncio.run(reserve(run_bundles(of, gpus=1), 120, lambda line: None))
    nodes = placement_group_table(room)["bundles_to_node_id"]
    remove_placement_group(room)
    return [nodes[index] for index in range(len(nodes))], []

*placing, starting = sys.argv[1:]
nodes.wait_for_nodes()
ray.init(address=nodes.address, logging_level="error", log_to_driver=False)
atexit.register(ray.shutdown)
os.environ["RAY_ADDRESS"] = nodes.address
for recipe in placing:
    print("SAID", json.dumps(placed(load_config([recipe], []))))
print("SAID", json.dumps(started(load_config([starting], []), Path(folder.name))))
"""


def said(script: str, *words: str) -> list[str]:
    """What a script says about a Ray of its own, whose nodes or GPUs are pretended."""
    command, environment = [sys.executable, "-c", script, *words], {**os.environ, "PYTHONPATH": os.getcwd()}
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return [line.removeprefix("SAID ") for line in done.stdout.splitlines() if line.startswith("SAID ")]


@pytest.mark.timeout(500)
def test_every_recipe_of_several_nodes_finds_its_places_and_its_actors_answer_there() -> None:
    """The actors of one are started; those of the others differ in their number only."""
    recipes = {str(file): load_config([file], []) for file in sorted(Path("configs").glob("*.yaml"))}
    parts = recipes.items()
    gpus = {name: of.trainer.ranks + of.generator.min_engines * of.generator.engine_gpus for name, of in parts}
    starting = "configs/qwen3_30b_a3b.yaml"
    names = sorted((name for name in recipes if gpus[name] > 8), key=lambda name: name == starting)
    assert len(names) >= 4 and names[-1] == starting
    for name, line in zip(names, said(RECIPES, *names), strict=True):
        (nodes, of_engines), of = json.loads(line), recipes[name]
        bundles = of.trainer.ranks + of.generator.min_engines
        assert len({*nodes[:bundles]}) == -(-gpus[name] // 8), f"{name} is on as few nodes as possible"
        assert len({*nodes[: of.trainer.ranks]}) == -(-of.trainer.ranks // 8), f"{name}: ranks fill nodes"
    assert of_engines == [2, 2, 0, 0], "GPUs of the engines, the buffer and the metrics hub"


@pytest.mark.full
def test_engines_are_on_the_gpus_of_ranks_where_weights_go_by_cuda_ipc_and_else_each_part_has_its_own() -> None:
    shared, apart, missing = said(GPUS)
    first, second, *ranks = json.loads(shared)
    assert [first, second] == ranks[:2]
    assert len({gpu for (gpu,) in ranks}) == 3
    first, second, *ranks = json.loads(apart)
    assert len(first) == len(second) == 2 and all(len(rank) == 1 for rank in ranks)
    assert len({gpu for gpus in (first, second, *ranks) for gpu in gpus}) == 7
    assert missing.startswith("no room in the Ray cluster for 3 s: ")
    assert "2 x (" in missing and "0.001 accelerator_type:H100" in missing
