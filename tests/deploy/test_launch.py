"""The files for SkyPilot and `ray up`: their schemas, by which `test_every_file.py` checks them, and their commands."""

import copy
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from actors import RAY_ENV

ROOT = Path(__file__).parents[2]
RAY = ROOT / "deploy/ray/cluster.yaml"
SKY = ROOT / "deploy/skypilot/baton.yaml"

LOCAL = ("type", "head_ip", "worker_ips")
"""What Ray reads of the provider `local`."""
FIELDS = {"name", "workdir", "resources", "envs", "setup", "run"}
"""The fields that the task uses, of the schema of SkyPilot 0.14.1, whose own reader took the file."""


def check_cluster(document: dict[str, Any]) -> None:
    """Raises where Ray would refuse the file for `ray up`; what it leaves open of `provider` is listed here."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    validate_config(prepare_config(copy.deepcopy(document)))
    assert document["provider"].keys() <= {*LOCAL}


def check_task(document: dict[str, Any]) -> None:
    """Raises where SkyPilot would refuse the task."""
    assert {"resources", "setup", "run"} <= document.keys() <= FIELDS
    assert document["resources"].keys() <= {"accelerators", "use_spot", "disk_size"}


def test_rays_commands_have_options_that_ray_has_and_ask_for_a_token() -> None:
    from ray.scripts.scripts import start

    known = {name for option in start.params for name in option.opts}
    cluster = yaml.safe_load(RAY.read_text())
    for part in ("head", "worker"):
        stop, command = cluster[f"{part}_start_ray_commands"]
        assert stop.endswith("/ray stop") and "RAY_AUTH_MODE=token" in command
        words = [word.partition("=")[0] for word in shlex.split(command) if word.startswith("--")]
        assert words and set(words) <= known
    assert list(cluster["file_mounts"]) == ["~/.ray/auth_token"]


def test_the_task_names_a_recipe_that_there_is_and_the_store_is_asked_for() -> None:
    envs = yaml.safe_load(SKY.read_text())["envs"]
    assert (ROOT / envs["RECIPE"]).is_file() and envs["STORE"] is None


@pytest.mark.parametrize(
    ("resumed", "begun", "code", "calls"),
    [
        (0, 0, 0, ["--resume s3://b/r"]),
        (2, 0, 0, ["--resume s3://b/r", "--config mine.yaml run.store=s3://b/r"]),
        (2, 1, 1, ["--resume s3://b/r", "--config mine.yaml run.store=s3://b/r"]),
        (1, 0, 1, ["--resume s3://b/r"]),
    ],
)
def test_a_node_resumes_what_the_store_holds_and_else_begins(
    resumed: int, begun: int, code: int, calls: list[str], tmp_path: Path
) -> None:
    (program := tmp_path / ".venv/bin/baton").parent.mkdir(parents=True)
    program.write_text(f'#!/bin/sh\nshift; echo "$*" >> calls\n[ "$1" = --resume ] && exit {resumed}\nexit {begun}\n')
    program.chmod(0o755)
    script = yaml.safe_load(SKY.read_text())["run"]
    environment = {**os.environ, "RECIPE": "mine.yaml", "STORE": "s3://b/r"}
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environment, timeout=60, check=False)
    assert done.returncode == code
    assert (tmp_path / "calls").read_text().splitlines() == calls


def test_the_slurm_file_is_bash_and_has_every_setting_of_a_rays_environment() -> None:
    file = ROOT / "deploy" / "slurm" / "train.sbatch"
    assert subprocess.run(["bash", "-n", file], capture_output=True, check=False).stderr == b""
    text = file.read_text()
    words = text.replace("${RAY_raylet_start_wait_time_s:-60}", "60")
    assert [name for name, value in RAY_ENV.items() if f"{name}={value}" not in words] == []
