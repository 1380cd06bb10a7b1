"""Two Ray nodes on one machine, of which the second has a file system of its own, and GPUs that nobody can use."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.full]

DRIVER = """
import asyncio, os, subprocess, sys, tempfile
from pathlib import Path
import ray
from actors.driver.node_check import RunFiles, check_nodes
from actors.driver.placement import Bundle, reserve
from service.errors import UserError

shared, head = Path(sys.argv[1]), None
with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
    context = ray.init(
        address="local", num_cpus=1, num_gpus=0, include_dashboard=False, logging_level="error", _temp_dir=folder
    )
    address = ray.get_runtime_context().gcs_address
    start = f"exec ray start --address {address} --num-cpus 2 --num-gpus 1 --block"
    hidden = f"mount -t tmpfs none {shared}/model && {start}"
    second = subprocess.Popen(["unshare", "--mount", "sh", "-c", hidden], start_new_session=True)
    try:
        for bundles in ([{"CPU": 1.0}, {"CPU": 2.0}], [{"CPU": 1.0}, {"CPU": 1.0, "GPU": 1.0}]):
            bundles = [Bundle(resources) for resources in bundles]
            room = asyncio.run(reserve(bundles, 120, lambda line: None))
            try:
                check_nodes(room, bundles, RunFiles.of(shared / "model", [shared / "train.jsonl"], shared))
                print("SAID nothing")
            except UserError as error:
                print("SAID", error)
            ray.util.remove_placement_group(room)
    finally:
        second.terminate()
        second.wait(60)
        ray.shutdown()
"""


def can_hide_a_folder() -> bool:
    return subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode == 0


@pytest.mark.skipif(not can_hide_a_folder(), reason="mounts of a process's own need root")
def test_a_node_that_lacks_the_model_or_cuda_is_named_before_anything_loads(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "train.jsonl").write_text("{}")
    said = subprocess.run(
        [sys.executable, "-c", DRIVER, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=400,
        env={**os.environ, "PYTHONPATH": os.getcwd(), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
    )
    lines = [line.removeprefix("SAID ") for line in said.stdout.splitlines() if line.startswith("SAID")]
    assert len(lines) == 2, said.stdout + said.stderr
    assert f"has no {tmp_path}/model/config.json; ranks or engines run there" in lines[0]
    assert "has GPUs, but PyTorch cannot use them: it was built without CUDA" in lines[1]
