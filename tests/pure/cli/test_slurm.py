"""`baton slurm`: what it submits and refuses; what the batch file does, with stand-ins for Slurm's programs and Ray.

`tests/hosts/test_slurm.py` runs it on a real Slurm.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from actors import RAY_ENV
from service.cli import slurm
from service.cli.parser import main
from service.files import LOCK
from tests.waiting import free_port, until

ROOT = Path(__file__).parents[3]
CONFIG = ["--config", str(ROOT / "configs" / "quickstart.yaml")]
NODES = ["--", "--nodes", "4", "--partition", "gpu"]

Place = Callable[[str, str], None]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """Puts a program into the PATH, in a shared folder that is the current one."""
    monkeypatch.setattr(slurm, "OWN_FOLDERS", (Path("/own"),))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")

    def program(name: str, text: str) -> None:
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)

    program("sbatch", "exit 9")
    return program


def batch_file(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["slurm", *CONFIG, "--print", *words]) == 0
    return capsys.readouterr().out


def test_what_is_printed_is_what_is_submitted_and_printing_makes_nothing(
    place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret-of-another-cluster")
    text = batch_file(capsys, "run.max_steps=7", *NODES)
    assert not (tmp_path / "runs").exists()
    place("sbatch", 'cat > "$PWD/submitted"; env > "$PWD/environment"; echo "$*" > "$PWD/words"; echo "4711;cluster"')
    assert main(["slurm", *CONFIG, "run.max_steps=7", *NODES]) == 0
    said = capsys.readouterr().out
    assert f"submitted job 4711: run folder {tmp_path}/runs/quickstart-4711\n" in said
    assert (tmp_path / "submitted").read_text() == text and (tmp_path / "runs" / "slurm").is_dir()
    assert "secret" not in (tmp_path / "environment").read_text() + text
    assert (tmp_path / "words").read_text() == "--parsable\n"


def test_the_options_of_the_user_and_those_of_baton_are_in_the_file(
    place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = batch_file(capsys, "run.stop_grace=120", "--", "--nodes=2", "--comment", "a run.seed=1", "--gres=gpu:8")
    head = "\n".join(line for line in text.splitlines() if line.startswith("#SBATCH"))
    assert "--nodes=2 --comment 'a run.seed=1' --gres=gpu:8" in head
    assert "--signal=B:USR1@180" in head and f"--output {tmp_path}/runs/slurm/%j.log" in head
    assert "--requeue" in head and "--no-kill" in head and "--ntasks-per-node=1" in head
    assert re.findall(r"@[A-Z_]+@", text) == [], "nothing is left to be filled in"


def test_words_of_the_user_that_look_like_places_of_the_template_stay_as_they_are(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    text = batch_file(capsys, "--", "--nodes=2", "--comment", "@SETTINGS@ @DIR@")
    assert "#SBATCH --nodes=2 --comment '@SETTINGS@ @DIR@'" in text


def test_every_setting_of_a_rays_environment_is_in_the_file(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    text = batch_file(capsys, *NODES)
    assert [setting for setting in (f"{name}={value}" for name, value in RAY_ENV.items()) if setting not in text] == []


def test_ranks_and_generators_are_placed_on_the_two_groups_of_nodes(
    place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = batch_file(capsys, "--", "--nodes", "1", ":", "--nodes", "4", "-p", "spot")
    head = [line for line in text.splitlines() if line.startswith("#SBATCH")]
    assert head[-4:-2] == ["#SBATCH --nodes 1", "#SBATCH hetjob"] and head[-1] == "#SBATCH --nodes 4 -p spot"
    assert "'placement.trainer={part: trainer}' 'placement.generators={part: generators}'" in text
    own = batch_file(capsys, "placement.trainer={a: b}", "--", "--nodes=1", ":", "--nodes=4")
    assert "'placement.trainer={a: b}' 'placement.generators={part: generators}')" in own
    (tmp_path / "placed.yaml").write_text("placement: {trainer: {a: b}, generators: {c: d}}")
    assert "placement." not in batch_file(capsys, "--config", "placed.yaml", "--", "--nodes=1", ":", "--nodes=4")


def test_a_time_of_zero_is_no_limit(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    assert "#SBATCH --nodes 1 --time 0\n" in batch_file(capsys, "--", "--nodes", "1", "--time", "0")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ([], "give sbatch's options after --"),
        (["--", "--nodes", "1", ":"], "give sbatch's options after --"),
        (["--", "--nodes=1", ":", "--nodes=1", ":", "--nodes=1"], "at most two groups"),
        (["word", *NODES], "'word': not of the form"),
        (["run.max_step=1", *NODES], "run.max_steps"),
        (["trainer.checkpoint_every=0", *NODES], "trainer.checkpoint_every=20"),
        (["run.dir=/own/runs", *NODES], "each node has its own /own"),
        (["--resume", "nothing", *NODES], "nothing: neither"),
        ([*NODES, "--comment", "a\nrm"], "is one line"),
        (NODES, "sbatch ended with exit code 9"),
        *(([*NODES, option], f"{option}: leave it out; {reason}") for option, reason in slurm.OWNED.items()),
        ([*NODES, "--ntasks-per-n=2"], "one task a node"),
        ([*NODES, "--time=0:30"], "--time 0:30: the run gets its stop signal"),
        ([*NODES, "--time", "1:0"], "lower run.stop_grace"),
        ([*NODES, "-t", "1"], "lower run.stop_grace"),
        ([*NODES, "-t1"], "lower run.stop_grace"),
        (["run.stop_grace=7200", *NODES, ":", "--nodes=1", "--time=0-2"], "--time 0-2"),
        ([*NODES, "-n4"], "one task a node"),
        ([*NODES, "--", "job.sh"], "once after --"),
        (["data.make_rows=null", "data.train=/own/rows.jsonl", *NODES], "/own/rows.jsonl: each node has its own /own"),
        ([*NODES, "--tim=0:30"], "lower run.stop_grace"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_is_submitted(
    words: list[str], why: str, place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["slurm", *CONFIG, *words]) == 2
    said = capsys.readouterr().err
    assert why in said and said.count("\n") == 1


def test_a_folder_that_nodes_do_not_share_is_a_note_where_nothing_is_submitted(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["slurm", *CONFIG, "--print", "run.dir=/own/runs", *NODES]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("#!") and "/own/runs/slurm" in said.out
    assert "/own/runs: each node has its own /own" in said.err and said.err.count("\n") == 1


def test_without_slurm_and_with_a_controller_that_refuses_one_line_says_so(
    place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place("sbatch", "echo 'sbatch: error: invalid partition specified: gpu' >&2; exit 1")
    assert main(["slurm", *CONFIG, *NODES]) == 2
    assert capsys.readouterr().err == "baton: sbatch: error: invalid partition specified: gpu\n"
    place("sbatch", "true")
    assert main(["slurm", *CONFIG, *NODES]) == 2
    assert "gave no number of a job" in capsys.readouterr().err
    (tmp_path / "bin" / "sbatch").unlink()
    if shutil.which("sbatch") is None:
        assert main(["slurm", *CONFIG, *NODES]) == 2
        assert "there is no sbatch here" in capsys.readouterr().err


SCONTROL = """
case "$1 $2" in
    "show hostnames") printf 'n1\\nn2\\n' ;;
    "show node") echo "NodeName=$4 NodeAddr=127.0.0.1 Port=6818" ;;
    requeue*) echo "$2" >> "$ROOT/requeued" ;;
esac
"""
SRUN = """
while [ "$1" != bash ]; do case "$1" in --nodelist=*) export SLURMD_NODENAME=${1#*=} ;; esac; shift; done
shift
exec bash "$@"
"""
RAY = f"""
echo $$ > "$ROOT/ray-$SLURMD_NODENAME.new" && mv "$ROOT/ray-$SLURMD_NODENAME.new" "$ROOT/ray-$SLURMD_NODENAME"
echo "$SLURMD_NODENAME: $*" >> "$ROOT/rays"
case "$*" in *--head*) exec {sys.executable} -c 'import os, socket
server = socket.create_server(("127.0.0.1", int(os.environ["PORT"])))
while True: server.accept()[0].close()' ;; esac
exec sleep 1000
"""
BATON = """
run="$ROOT/runs/$RUN_NAME"
trap 'mkdir -p "$run/checkpoints/step_$STEP"; touch "$run/checkpoints/step_$STEP/manifest.json"; exit 143' TERM
mkdir -p "$run/logs"
echo "$*" >> "$ROOT/commands"
while [ ! -e "$ROOT/end" ]; do sleep 0.1; done
exit "$(cat "$ROOT/end")"
"""


class Batch:
    """A job's batch file under way, with stand-ins for all programs that it calls."""

    def __init__(self, text: str, folder: Path) -> None:
        self.folder, self.job = folder, 4000 * 50 + (free_port() - 20_000) // 3
        self.write(text)
        self.run = folder / "runs" / f"quickstart-{self.job}"

    def write(self, text: str) -> None:
        (self.folder / "job.sh").write_text(text.replace(str(Path(sys.executable).parent), str(self.folder / "bin")))

    def start(self, restarts: int = 0, step: int = 3) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        own = {"ROOT": self.folder, "RUN_NAME": self.run.name, "STEP": step}
        slurms = {"SLURM_JOB_ID": self.job, "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_CPUS_ON_NODE": 2}
        slurms |= {"SLURM_RESTART_COUNT": restarts} if restarts else {}
        environment = kept | {name: str(value) for name, value in (own | slurms).items()}
        with (self.folder / "said").open("a") as said:
            command = ["bash", str(self.folder / "job.sh")]
            self.process = subprocess.Popen(
                command, env=environment, stdout=said, stderr=said, stdin=subprocess.DEVNULL
            )

    def until_started(self, times: int = 1) -> None:
        until(lambda: len(self.lines("commands")) == times and len(self.lines("rays")) == 2 * times, 60, self.said)

    def lines(self, name: str) -> list[str]:
        file = self.folder / name
        return file.read_text().splitlines() if file.exists() else []

    def said(self) -> str:
        return "\n".join(self.lines("said"))

    def end(self) -> int:
        code = self.process.wait(60)
        for node in ("n1", "n2"):
            ray = int((self.folder / f"ray-{node}").read_text())
            until(lambda ray=ray: not Path(f"/proc/{ray}").exists(), 30, self.said)
        assert not Path(f"/tmp/baton-{self.job}").exists()
        return code


@pytest.fixture
def batch(place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Batch:
    text = batch_file(capsys, "run.seed=5", *NODES)
    place("python", f'exec {sys.executable} "$@"')
    place("squeue", "echo RUNNING")
    for name, program in {"scontrol": SCONTROL, "srun": SRUN, "ray": RAY, "baton": BATON}.items():
        place(name, program)
    return Batch(text, tmp_path)


def test_a_job_starts_ray_on_every_node_and_the_run_and_ends_with_its_exit_code(batch: Batch) -> None:
    batch.start()
    batch.until_started()
    port = 20_000 + batch.job % 4000 * 3
    head, worker = sorted(batch.lines("rays"))
    assert head.startswith("n1: start --block") and f"--head --node-ip-address=127.0.0.1 --port={port}" in head
    assert worker.startswith("n2: start --block") and f"--address=127.0.0.1:{port}" in worker
    settings = f"run.seed=5 run.dir={batch.folder}/runs run.name=quickstart-{batch.job}"
    assert batch.lines("commands") == [f"run {shlex.join(CONFIG)} {settings}"]
    log = batch.run / "logs" / "node-n2.log"
    until(log.is_symlink, 30)
    (batch.folder / "end").write_text("2")
    assert batch.end() == 2 and batch.lines("requeued") == []


def test_near_the_time_limit_the_run_stops_the_job_requeues_itself_and_its_next_start_resumes(batch: Batch) -> None:
    batch.start()
    batch.until_started()
    batch.process.send_signal(signal.SIGUSR1)
    batch.end()
    assert batch.lines("requeued") == [str(batch.job)]
    assert f"goes on from {batch.run}/checkpoints/step_3/manifest.json" in batch.said()
    batch.start(restarts=1)
    batch.until_started(2)
    assert batch.lines("commands")[1] == f"run --resume {batch.run} run.seed=5"
    batch.process.send_signal(signal.SIGTERM)
    assert batch.end() == 143 and len(batch.lines("requeued")) == 1, "scancel ends it"
    assert batch.said().count(f"a new one goes on: baton slurm --resume {batch.run} -- ") == 1, "at its end only"


def test_a_new_job_resumes_the_run_of_an_old_one_and_never_begins_another(
    batch: Batch, capsys: pytest.CaptureFixture[str]
) -> None:
    old = batch.folder / "runs" / "old"
    old.mkdir(parents=True)
    shutil.copyfile(CONFIG[1], old / "config.yaml")
    (old / LOCK).touch()
    text = batch_file(capsys, "--resume", "old", "run.seed=6", *NODES)
    batch.write(text)
    batch.start()
    batch.until_started()
    assert batch.lines("commands") == [f"run --resume {old} {shlex.join(CONFIG)} run.seed=6"]
    (batch.folder / "end").write_text("2")
    assert batch.end() == 2 and (old / "config.yaml").exists()


def test_starts_that_bring_no_checkpoint_come_to_an_end(batch: Batch) -> None:
    for restarts in range(5):
        batch.start(restarts, step=3)
        batch.until_started(restarts + 1)
        batch.process.send_signal(signal.SIGUSR1)
        code = batch.end()
        assert len(batch.lines("requeued")) == min(restarts + 1, 4)
    assert code == 143 and "4 starts brought no checkpoint" in batch.said()


def test_a_run_that_fails_requeues_its_job_only_if_a_node_was_lost(batch: Batch) -> None:
    batch.start()
    batch.until_started()
    os.kill(int((batch.folder / "ray-n2").read_text()), signal.SIGKILL)
    time.sleep(1)
    assert batch.process.poll() is None and batch.lines("requeued") == [], "the head is there: the run may go on"
    (batch.folder / "end").write_text("1")
    batch.end()
    assert batch.lines("requeued") == [str(batch.job)] and "Ray ended before the run on: n2" in batch.said()
    batch.start(restarts=1)
    assert batch.end() == 1 and len(batch.lines("requeued")) == 1
    assert (batch.run.with_name(f"{batch.run.name}.start-1") / "logs").is_dir()


def test_the_other_nodes_requeue_a_job_whose_first_node_is_lost(batch: Batch) -> None:
    batch.start()
    batch.until_started()
    batch.process.kill()
    batch.process.wait(30)
    for node in ("n1", "n2"):
        os.kill(int((batch.folder / f"ray-{node}").read_text()), signal.SIGKILL)
    until(lambda: batch.lines("requeued") == [str(batch.job)] * 2, 60, batch.said)
    (batch.folder / "end").write_text("1")


def test_the_batch_file_has_no_finding_of_shellcheck(
    place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    (tmp_path / "job.sh").write_text(batch_file(capsys, "--", "--nodes=1", ":", "--nodes=2"))
    done = subprocess.run(["shellcheck", str(tmp_path / "job.sh")], capture_output=True, text=True, check=False)
    assert done.stdout == ""


def test_an_example_of_the_page_says_what_is_refused(place: Place) -> None:
    page = (ROOT / "docs" / "slurm.md").read_text()
    named = re.findall(r"\(`(--[^)]*)`\)\.$", page, re.MULTILINE)
    assert named and [option for option in named[0].split("`, `") if option not in slurm.OWNED] == []
