"""`ray job submit`, word for word as the README has it, against a Ray that was started as the README has it."""

import json
import os
import re
import secrets
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.conftest import LeftOver
from tests.waiting import free_port, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1000)]

ROOT = Path(__file__).parents[2]
MARK = "BATON_TEST_CLUSTER"
STARTING = ("No available agent", "Failed to connect to Ray")
"""What Ray answers in the first seconds of a cluster."""
TRIES = 60
JOB_SECONDS = 600.0
SHORT = "run.max_steps=2 trainer.ranks=1 model.warm_start.steps=10 metrics.port=0"


def readme_commands() -> list[str]:
    """The lines of the README's block that starts a cluster and submits a job."""
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (block,) = [block for block in blocks if "ray job submit" in block]
    return str(block).splitlines()


def plain_shell(home: Path, mark: str) -> dict[str, str]:
    """The environment of somebody's terminal: none of the settings that this test session made."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "BATON_", "PYTEST_"))}
    venv = Path(sys.prefix) / "bin"  # what `source .venv/bin/activate` puts first
    session = {name: value for name, value in os.environ.items() if name == "BATON_TEST_SESSION"}
    path = f"{venv}:{os.environ['PATH']}"
    # At Ray's low priority its workers would wait for the tests beside them.
    return {**kept, **session, MARK: mark, "HOME": str(home), "PATH": path, "RAY_worker_niceness": "0"}


@dataclass
class Cluster:
    """A Ray head, and how somebody speaks to it."""

    home: Path
    environment: dict[str, str]
    set_up: list[str]
    submit_command: str

    def begin(self, command: str, log: Path) -> subprocess.Popen[bytes]:
        """Run a command in somebody's shell, after what stands above it in the README's block."""
        script = "\n".join(["set -e", *self.set_up, command])
        with log.open("w") as said:
            return subprocess.Popen(
                ["bash", "-c", script],
                cwd=ROOT,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
            )

    def submit(self, settings: str) -> str:
        """What the README's submit command with more settings prints; again while the cluster is still starting."""
        said, log = STARTING[0], self.home / "said"
        for _ in range(TRIES):
            if not any(sign in said for sign in STARTING):
                break
            job = self.begin(f"{self.submit_command} {settings}", log)
            until(lambda job=job: job.poll() is not None, JOB_SECONDS, log.read_text)
            said = log.read_text()
        assert job.returncode == 0, said
        return said


@pytest.fixture(scope="module")
def cluster(left_over: LeftOver) -> Iterator[Cluster]:
    """`ray start --head` with ports and folders of its own, so that it disturbs nobody and nobody disturbs it."""
    lines = readme_commands()
    head = next(line for line in lines if line.startswith("ray start"))
    submit = next(line for line in lines if line.startswith("ray job submit"))
    # Not the activation: the environment under test may lie elsewhere than in the checkout.
    set_up = [line for line in lines if line not in (head, submit) and not line.startswith("source ")]
    with tempfile.TemporaryDirectory(prefix="job-", ignore_cleanup_errors=True) as folder:
        home, mark, dashboard = Path(folder), secrets.token_hex(8), free_port()
        environment = {**plain_shell(home, mark), "RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{dashboard}"}
        others = ("port", "dashboard-agent-listen-port", "ray-client-server-port", "metrics-export-port")
        own = [f"--{name}={free_port()}" for name in others]
        own += [f"--dashboard-port={dashboard}", "--num-cpus=4", f"--temp-dir={folder}/ray", "--block"]
        cluster = Cluster(home, environment, set_up, submit)
        ray = cluster.begin(f"exec {head} {' '.join(own)}", home / "head.log")
        yield cluster
        ray.terminate()
        ray.wait(timeout=120)
        assert left_over(MARK, mark, 60) == {}


def test_a_job_trains_and_leaves_its_run_folder_where_it_lasts(cluster: Cluster) -> None:
    assert "finished after 2 optimizer steps" in cluster.submit(SHORT)
    run = cluster.home / "runs" / "quickstart"
    assert json.loads((run / "summary.json").read_text())["state"] == "finished"
    assert (run / "final" / "model.safetensors").is_file()
    token = cluster.home / ".ray" / "auth_token"
    assert token.stat().st_mode & 0o077 == 0, "others can read the cluster's token"


def asked(cluster: Cluster, path: str, token: str | None = None, body: bytes | None = None) -> int:
    """The status that the dashboard answers with, as soon as there is one."""
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {token}"} if token else {})}
    url = cluster.environment["RAY_API_SERVER_ADDRESS"] + path

    def status() -> int:
        try:
            with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=60) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    return until(status, 180, (cluster.home / "head.log").read_text)


def test_without_the_token_nothing_is_answered_and_nothing_runs(cluster: Cluster) -> None:
    trace = cluster.home / "a-stranger-was-here"
    job = json.dumps({"entrypoint": f"touch {trace}"}).encode()
    for token in (None, "0" * 64):
        assert {asked(cluster, path, token) for path in ("/api/version", "/api/jobs/")} <= {401, 403}
        assert asked(cluster, "/api/jobs/", token, job) in (401, 403)
    token = (cluster.home / ".ray" / "auth_token").read_text()
    assert asked(cluster, "/api/jobs/", token) == 200
    assert not trace.exists()


def test_the_token_is_in_no_command_line_and_in_no_log(cluster: Cluster) -> None:
    token = (cluster.home / ".ray" / "auth_token").read_bytes()
    shown = [path for path in Path("/proc").glob("[0-9]*/cmdline") if holds(path, token)]
    written = [path for path in cluster.home.rglob("*") if path.name != "auth_token" and holds(path, token)]
    assert (shown, written) == ([], [])


def holds(path: Path, words: bytes) -> bool:
    """Whether a file can be read and has these bytes in it."""
    try:
        return path.is_file() and words in path.read_bytes()
    except OSError:
        return False
