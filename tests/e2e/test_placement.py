"""Ranks and engines are placed together, all or none, on nodes that have what they need; what is missing is said."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.full]

BEGIN = """
import asyncio, subprocess, sys, tempfile
from pathlib import Path
import ray
from actors.driver.node_check import RunFiles, check_nodes
from actors.driver.placement import Bundle, engine_index, engine_options, rank_options, reserve, run_bundles
from service.config import load_config
from service.errors import BatonError

def config(*settings):
    return load_config(["configs/quickstart.yaml"], settings)

with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
    ray.init(address="local", num_cpus=8, num_gpus=7, include_dashboard=False, logging_level="error", _temp_dir=folder)
"""
GPUS = """
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
NODES = """
    shared, address = Path(sys.argv[1]), ray.get_runtime_context().gcs_address
    start = f"exec ray start --address {address} --num-cpus 16 --num-gpus 8 --block"
    hidden = f"mount -t tmpfs none {shared}/model && {start}"
    second = subprocess.Popen(["unshare", "--mount", "sh", "-c", hidden], start_new_session=True)
    try:
        for bundles in ([{"CPU": 8.0}, {"CPU": 16.0}], [{"CPU": 1.0}, {"CPU": 1.0, "GPU": 8.0}]):
            bundles = [Bundle(resources) for resources in bundles]
            room = asyncio.run(reserve(bundles, 120, lambda line: None))
            try:
                check_nodes(room, bundles, RunFiles.of(shared / "model", [shared / "train.jsonl"], shared))
                print("SAID nothing")
            except BatonError as error:
                print("SAID", error)
            ray.util.remove_placement_group(room)
    finally:
        second.terminate()
        second.wait(60)
        ray.shutdown()
"""


def said(script: str, *arguments: str) -> list[str]:
    """What a script says about a Ray of its own, whose GPUs are pretended."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + script, *arguments],
        capture_output=True,
        text=True,
        timeout=400,
        env={**os.environ, "PYTHONPATH": os.getcwd(), "PATH": path},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [line.removeprefix("SAID ") for line in done.stdout.splitlines() if line.startswith("SAID ")]


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


def can_hide_a_folder() -> bool:
    return subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode == 0


@pytest.mark.skipif(not can_hide_a_folder(), reason="mounts of a process's own need root")
def test_a_node_that_lacks_the_model_or_cuda_is_named_before_anything_loads(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "train.jsonl").write_text("{}")
    model, cuda = said(NODES, str(tmp_path))
    assert f"has no {tmp_path}/model/config.json; ranks or engines run there" in model
    assert "has GPUs, but PyTorch cannot use them: it was built without CUDA" in cuda
