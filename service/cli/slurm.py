"""`baton slurm`: writes and submits one batch file that runs a training on nodes of a Slurm cluster."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from service.errors import UserError
from service.files import resolved
from service.run.phases import say

if TYPE_CHECKING:
    from service.config import Config

ABOUT = """\
Submit `baton run` as a Slurm job: Ray's head on its first node, a worker on each other node. Near the time limit the
run is stopped, and the job requeues itself and resumes the run; it also does so if a node is lost that the run needs.
"""

EXAMPLES = """\
examples:
  baton slurm --config mine.yaml -- --nodes 4 --partition gpu --gpus-per-node 8 --exclusive --time 1-0
  baton slurm --config mine.yaml --print -- --nodes 4            # shows the batch file, submits nothing
  baton slurm --config mine.yaml -- --nodes 1 --partition train : --nodes 4 --partition spot
  baton slurm --resume runs/mine-4711 -- --nodes 4               # a new job continues the run of an old one

What follows -- are options of sbatch. With : between two groups of options the ranks run on the nodes of the first
one and the generators on those of the second one (a heterogeneous job).

Submit from a folder that all nodes share; Python's environment, the model and the data must lie on them, too. The run
folder is run.dir/NAME-JOB, the job's output run.dir/slurm/JOB.log. Each node's log is logs/node-NAME.log in the run.

run.stop_grace + 60 seconds before the time limit the run gets its stop signal; lower run.stop_grace for short limits.
`scancel --batch --signal=TERM JOB` ends the run in order, with its final weights; `scancel JOB` does so, too, but Slurm
kills what is left after its KillWait (30 s, if your site has not changed it).
"""

TEMPLATE = "slurm_job.sh"
STOP_SECONDS = 60
"""Seconds between the end of `run.stop_grace` and the time limit, because Slurm may send the stop signal late."""
MOST_SIGNAL_SECONDS = 65_535
"""Maximum number of seconds that sbatch accepts in `--signal`."""
SUBMIT_SECONDS = 60.0

_OWNED = {
    "Ray needs one task a node": "--ntasks --ntasks-per-node -n",
    "the job's output is run.dir/slurm/JOB.log": "--output --error --open-mode -o -e",
    "the job has to survive the loss of a node, and to requeue itself": "--requeue --no-requeue --no-kill -k",
    "run.stop_grace says how long before the time limit the run is stopped": "--signal",
    "the job works in the current folder": "--chdir -D",
    "a job is one run; submit one job for each run": "--array -a",
    "the job's command is `baton run`": "--wrap",
    "the command ends when the job is submitted": "--wait --test-only -W",
}
OWNED = {option: reason for reason, options in _OWNED.items() for option in options.split()}
"""Options of sbatch that Baton sets or that a run cannot have, with the reason."""
PARTS = ("trainer", "generators")
"""The part of `placement` that runs on the nodes of the first, and of the second, component of a heterogeneous job."""
OWN_FOLDERS = tuple(map(Path, ("/tmp", "/var/tmp", "/dev/shm", "/run")))
"""Folders that nodes do not share: each node has its own."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command, other than those of its configuration."""
    parser.usage = (
        "baton slurm {--config FILE | --resume RUN} [section.key=value ...] [--print] -- OPTION OF SBATCH ..."
    )
    parser.add_argument("--resume", metavar="RUN", type=Path, help="continue this run, whose job has ended")
    parser.add_argument("--print", action="store_true", help="print the batch file, and submit nothing")


def run(arguments: argparse.Namespace, overrides: list[str]) -> int:
    """Print or submit the job.

    Raises:
        UserError: the configuration or an option is wrong, a folder is not shared, or Slurm refuses the job.
    """
    from service.config.command_line import checked_config
    from service.config.paths import is_on_hub, paths
    from service.run.folder import CONFIG, run_folder

    words = arguments.overrides
    first = next((number for number, word in enumerate(words) if word.startswith("-")), len(words))
    arguments.overrides, components = words[:first], split(words[first:])
    files = [resolved(file) for file in arguments.config]
    resume = None if arguments.resume is None else run_folder(arguments.resume).resolve()
    if resume is not None:
        arguments.config.insert(0, resume / CONFIG)
    config = checked_config(arguments, overrides).config
    runs = resolved(config.run.dir) if resume is None else resume.parent
    named = [resolved(path) for _, _, path in paths(config) if not is_on_hub(path)]
    refuse_unfit(config)
    unshared = not_shared([Path.cwd(), *files, runs, *named])
    if unshared and not arguments.print:
        raise UserError(unshared)
    refuse_short(config, components)
    apart = [part for part in PARTS if len(components) > 1 and not getattr(config.placement, part)]
    settings = [*overrides, *(f"placement.{part}={{part: {part}}}" for part in apart)]
    script = batch_file(config, runs, files, settings, components, resume)
    if arguments.print:
        print(script, end="")
        if unshared:
            print(f"baton: NOTE this cannot be submitted: {unshared}", file=sys.stderr)
    else:
        job = submit(script, runs)
        say(f"submitted job {job}: run folder {resume or runs / f'{config.run.name}-{job}'}")
        say(f"its output: tail -F {shlex.quote(str(runs / 'slurm' / f'{job}.log'))}")
        say(f"end it in order once it runs: scancel --batch --signal=TERM {job}")
    return 0


def split(options: Sequence[str]) -> list[list[str]]:
    """The sbatch options of each component of the job; the word `:` separates two components.

    >>> split(["--nodes", "1", ":", "--nodes=4"])
    [['--nodes', '1'], ['--nodes=4']]

    Raises:
        UserError: there are no options, there are too many components, or one that a run
            cannot have (`OWNED`).
    """
    components: list[list[str]] = [[]]
    for word in options:
        if word == ":":
            components.append([])
        else:
            components[-1].append(word)
    if not all(components):
        raise UserError("give sbatch's options after --, such as: -- --nodes 4 --partition gpu")
    if len(components) > len(PARTS):
        raise UserError("a job has at most two groups of nodes: that of the ranks : that of the generators")
    for word in options:
        name = word.partition("=")[0] if word.startswith("--") else word[:2]
        # sbatch accepts the beginning of a long option's name, too.
        owned = next((own for own in OWNED if own == name or (len(name) > 3 and own.startswith(name))), None)
        if owned is not None:
            raise UserError(f"{word}: leave it out; {OWNED[owned]}")
        if name == "--":
            raise UserError("-- --: give sbatch's options once after --; the job's command is `baton run`")
        if not word.isprintable():
            raise UserError(f"{word!r}: an option of sbatch is one line")
    return components


def refuse_unfit(config: Config) -> None:
    """Raise a `UserError` if the configuration writes no checkpoints, because a requeued job could not continue."""
    if not config.trainer.checkpoint_every:
        raise UserError(
            "trainer.checkpoint_every: with 0 there is no checkpoint from which a requeued job could continue; "
            "set the number of optimizer steps between two, such as trainer.checkpoint_every=20"
        )


def not_shared(paths: Sequence[Path]) -> str | None:
    """A message about the first path that nodes do not share, because it is in one of `OWN_FOLDERS`; None if nodes
    share all paths."""
    found = ((path, own) for path in paths for own in OWN_FOLDERS if path.is_relative_to(own))
    return next(
        (
            f"{path}: each node has its own {own}; submit from a folder that all nodes share, with run.dir, "
            "configuration, model and data in such folders"
            for path, own in found
        ),
        None,
    )


def refuse_short(config: Config, components: Sequence[Sequence[str]]) -> None:
    """Raises `UserError` if the stop signal would come at the job's start, because the job would requeue endlessly."""
    for words in components:
        for name, value in zip(words, [*words[1:], ""], strict=True):
            joined = re.fullmatch(r"(?:--tim?e?=|-t=?)(.+)", name)
            given = joined[1] if joined else value if name in ("--time", "--tim", "--ti", "-t") else ""
            # 0 is no limit
            if (seconds := limit_seconds(given)) and seconds <= stop_seconds(config):
                raise UserError(
                    f"--time {given}: the run gets its stop signal {stop_seconds(config)} seconds before the limit, so "
                    "that none are left to train; give more time, or lower run.stop_grace"
                )


def limit_seconds(limit: str) -> int | None:
    """The seconds of a time limit in one of sbatch's forms; None if it has another form.

    >>> limit_seconds("90"), limit_seconds("1:30"), limit_seconds("0:1:30"), limit_seconds("1-2")
    (5400, 90, 90, 93600)
    """
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", limit)
    if found is None:
        return None
    days, first, second, third = (int(number or 0) for number in found.groups())
    if found[1] is None and found[4] is None:  # minutes[:seconds]
        return first * 60 + second
    return days * 86_400 + first * 3600 + second * 60 + third


def stop_seconds(config: Config) -> int:
    """Seconds from the run's stop signal to the time limit."""
    return min(int(config.run.stop_grace) + STOP_SECONDS, MOST_SIGNAL_SECONDS)


def batch_file(
    config: Config,
    runs: Path,
    files: Sequence[Path],
    settings: Sequence[str],
    components: Sequence[Sequence[str]],
    resume: Path | None = None,
) -> str:
    """The text of the batch file: it runs `baton run` with the configuration `files` and `settings`.

    `components`: the sbatch options of each component of the job; `resume`: the folder of a run to continue.
    """
    quoted = shlex.quote(str(runs))
    configs = shlex.join([word for file in files for word in ("--config", str(file))])
    values = {
        "HEADER": "\n".join(header(config, runs / "slurm", components)),
        "BIN": shlex.quote(str(Path(sys.executable).parent)),
        "RUN": f"{quoted}/{config.run.name}-$SLURM_JOB_ID" if resume is None else shlex.quote(str(resume)),
        "LOGS": f"{quoted}/slurm",
        "SETTINGS": shlex.join(settings),
        "CONFIGS": configs,
        "RESUMED": configs if resume is not None else "",
        "IS_RESUMED": str(int(resume is not None)),
        "DIR": quoted,
        "PARTS": " ".join(PARTS if len(components) > 1 else ()),
    }
    text = (resources.files("service.cli") / TEMPLATE).read_text("utf-8")
    return re.sub("@([A-Z_]+)@", lambda found: values[found[1]], text)


def header(config: Config, logs: Path, components: Sequence[Sequence[str]]) -> list[str]:
    """The #SBATCH lines of the batch file."""
    signal = f"--signal=B:USR1@{stop_seconds(config)}"
    own = [
        ["--job-name", config.run.name, "--open-mode=append", signal, "--requeue"],
        ["--chdir", str(Path.cwd()), "--output", str(logs).replace("%", "%%") + "/%j.log"],
    ]
    each = [[["--ntasks-per-node=1", "--no-kill"], component] for component in components]
    lines = [*own, *each[0], *(line for more in each[1:] for line in (["hetjob"], *more))]
    return [f"#SBATCH {shlex.join(line)}" for line in lines]


def submit(script: str, runs: Path) -> str:
    """Submit the batch file; returns the job's number.

    Raises:
        UserError: sbatch is not installed, or it refuses the job.
    """
    if shutil.which("sbatch") is None:
        raise UserError("there is no sbatch here; submit on a login node of a Slurm cluster (--print shows the file)")
    (runs / "slurm").mkdir(parents=True, exist_ok=True)
    try:
        done = subprocess.run(
            ["sbatch", "--parsable"],
            input=script,
            # Slurm may store a job's environment, and the job creates its own token.
            env={name: value for name, value in os.environ.items() if name != "RAY_AUTH_TOKEN"},
            capture_output=True,
            text=True,
            timeout=SUBMIT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise UserError(
            f"sbatch has not ended within {SUBMIT_SECONDS:.0f} s; is Slurm's controller up? The job may be there "
            "nevertheless (squeue --me)"
        ) from None
    if done.returncode:
        raise UserError(" ".join(done.stderr.split()) or f"sbatch ended with exit code {done.returncode}")
    job = done.stdout.strip().partition(";")[0]
    if not job.isdecimal():
        raise UserError(f"sbatch gave no number of a job, but {done.stdout.strip()!r:.200}; look at squeue --me")
    return job
