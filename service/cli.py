"""The command `baton`."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from service import replay
from service.config import Config, check, check_paths, load, resolved_yaml
from service.errors import BatonError, UserError
from service.simulate import command as simulate
from service.status import fetch_status, status_address
from service.status_view import status_lines
from service.version import installed_version

PIPED_WIDTH = 120
"""Columns of a table when nothing says how wide the terminal is."""

PLAIN = ("trajectories", "status")
"""Commands without settings, where a word with = is a word like any other: `ordinal=812/sample=3/attempt=0`."""
_OVERRIDE = re.compile(r"(--)?[A-Za-z_]\w*(\.\w+)*=.*", re.DOTALL)
_OVERRIDE_KEY = re.compile(r"--[A-Za-z_]\w*(\.\w+)+")

ABOUT = """\
Baton trains language models on multi-turn tasks by asynchronous reinforcement learning:
vLLM generators stream steps into a buffer, an FSDP trainer learns from them, weights flow back.

    prompts --claim--> GENERATOR --submit--> BUFFER --lease--> TRAINER --publish--> weights --> GENERATOR
"""

EXAMPLES = """\
examples:
  baton run --config configs/quickstart.yaml
  baton run --config configs/quickstart.yaml trainer.lr=1e-4 run.seed=1
  baton run --config base.yaml --config mine.yaml        # the second file is merged over the first
  baton submit --config configs/quickstart.yaml          # the same as a job on a Ray cluster
  baton config validate --config mine.yaml               # what is wrong with it, without starting anything
  baton config show --config mine.yaml buffer.lookahead=0
  baton config schema > config.schema.json               # for completion in an editor
  baton status runs/quickstart                           # what a run is doing now
  baton trajectories list runs/quickstart                # what the rollouts say

`baton COMMAND --help` says more about a command. A setting is written section.key=value, in any number.
"""

RUN_ABOUT = """\
Run a training: starts Ray unless it runs already, prepares model and data, trains, writes the run folder.
"""

RUN_EXAMPLES = """\
examples:
  baton run --config configs/quickstart.yaml
  baton run --config configs/quickstart.yaml buffer.lookahead=0        # strictly on-policy
  baton run --config mine.yaml model.path=models/qwen3-0.6b data.train=data/train.jsonl
  baton run --resume runs/quickstart                                   # go on where it was stopped or killed

exit code: 0 finished, 2 the input is wrong (one line says what), 1 the run failed, 128 + n stopped by signal n.
"""


SUBMIT_NOTES = """\
The job works in a temporary copy of the current folder: configuration files must lie inside it, and run.dir should be
an absolute path (else the runs lie in the home of the node that it runs on). The cluster's token is read from
~/.ray/auth_token or RAY_AUTH_TOKEN. `ray job stop JOB` ends the run in order, with its final weights.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. Wrong input is one clear line and code 2."""
    words, overrides = split_overrides(sys.argv[1:] if argv is None else argv)
    arguments = _parser().parse_args(words)
    try:
        return int(arguments.command(arguments, overrides))
    except BatonError as error:
        for line in str(error).splitlines():
            print(f"baton: {line}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        # The reader of a pipe, such as `head`, has seen enough.
        sys.stderr.close()
        return 1
    except KeyboardInterrupt:
        return 130


def split_overrides(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words for the parser, and the settings: `a.b=c`, `--a.b=c` and `--a.b c`.

    >>> split_overrides(["run", "--config", "a.yaml", "trainer.lr=1", "--run.seed", "3"])
    (['run', '--config', 'a.yaml'], ['trainer.lr=1', '--run.seed', '3'])
    """
    words: list[str] = []
    overrides: list[str] = []
    if argv and argv[0] in PLAIN:
        return list(argv), []
    rest = iter(argv)
    for word in rest:
        if word.startswith("--config="):
            words.append(word)
        elif word == "--config":
            words += [word, *_next(rest)]
        elif _OVERRIDE_KEY.fullmatch(word):
            overrides += [word, *_next(rest)]
        elif _OVERRIDE.fullmatch(word):
            overrides.append(word)
        else:
            words.append(word)
    return words, overrides


def _next(words: object) -> list[str]:
    word = next(words, None)  # type: ignore[call-overload]
    return [] if word is None else [word]


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("baton", description=ABOUT, epilog=EXAMPLES, formatter_class=raw)
    parser.add_argument("--version", action="version", version=f"baton {installed_version()}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    run = commands.add_parser(
        "run", help="run a training", description=RUN_ABOUT, epilog=RUN_EXAMPLES, formatter_class=raw
    )
    _add_config(run)
    run.add_argument(
        "--resume",
        type=Path,
        metavar="RUN",
        help="go on from the newest checkpoint of a run folder, with its configuration",
    )
    run.set_defaults(command=_run)

    submit = commands.add_parser(
        "submit", help="run a training as a job on a Ray cluster", epilog=SUBMIT_NOTES, formatter_class=raw
    )
    _add_config(submit)
    submit.add_argument("--address", metavar="URL", help="of the cluster's dashboard (default: what Ray finds)")
    submit.add_argument("--no-follow", action="store_true", help="return at once instead of showing the output")
    submit.set_defaults(command=_submit)

    config = commands.add_parser("config", help="show or check a configuration, or print its schema")
    actions = config.add_subparsers(title="actions", metavar="ACTION", required=True)
    show = actions.add_parser("show", help="the resolved configuration as YAML, defaults included")
    _add_config(show)
    show.set_defaults(command=_config_show)
    validate = actions.add_parser("validate", help="check a configuration without starting anything")
    _add_config(validate)
    validate.set_defaults(command=_config_validate)
    schema = actions.add_parser("schema", help="the JSON schema of the configuration")
    schema.set_defaults(command=_config_schema)

    _add_status(commands.add_parser("status", help="what a run is doing now"))
    simulation = commands.add_parser(
        "simulate",
        help="what a configuration would do, without GPUs, under a virtual clock",
        description=simulate.ABOUT,
        epilog=simulate.EXAMPLES,
        formatter_class=raw,
    )
    _add_config(simulation)
    simulate.add_arguments(simulation)
    simulation.set_defaults(command=_simulate)
    again = commands.add_parser(
        "replay",
        help="one mini-batch of a run, formed again from its journal",
        description=replay.ABOUT,
        epilog=replay.EXAMPLES,
        formatter_class=raw,
    )
    replay.add_arguments(again)
    again.set_defaults(command=lambda arguments, overrides: replay.run(arguments))
    _add_trajectories(commands.add_parser("trajectories", help="look at what a run's rollouts said"))
    return parser


def _add_status(status: argparse.ArgumentParser) -> None:
    status.add_argument("run", metavar="URL-OR-RUN", help="http://host:port, a run folder, or the name of a run")
    status.add_argument("--json", action="store_true", help="the /status document as it is served")
    status.set_defaults(command=_status)


def _add_trajectories(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    listed = actions.add_parser("list", help="a line for each kept trajectory")
    listed.set_defaults(command=_trajectories_list)
    shown = actions.add_parser("show", help="one trajectory, with what carries loss in colour")
    shown.set_defaults(command=_trajectories_show)
    exported = actions.add_parser("export-html", help="one self-contained page of trajectories")
    exported.set_defaults(command=_trajectories_export)
    for action in (listed, shown, exported):
        action.add_argument("run", metavar="RUN", help="a run folder, or the name of a run")
    shown.add_argument("id", metavar="ID", help="such as ordinal=812/sample=3/attempt=0, or 812")
    exported.add_argument("--output", type=Path, metavar="FILE", help="default: trajectories.html in the run folder")
    for action in (listed, exported):
        action.add_argument("--last", type=int, default=50, metavar="N", help="the last N kept ones (default 50)")


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config", action="append", type=Path, default=[], metavar="FILE",
        help="a YAML file; given again, later files are merged over earlier ones",
    )  # fmt: skip
    # Taken out of the words before parsing; named here so that --help shows it.
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="set one value over the files")


def _load(arguments: argparse.Namespace, overrides: list[str]) -> Config:
    """The checked configuration of a command line."""
    _no_more_words(arguments)
    if not arguments.config:
        raise UserError("give a configuration: --config FILE (such as --config configs/quickstart.yaml)")
    loaded = load(arguments.config, overrides)
    check(loaded.config, loaded.source)
    return loaded.config


def _no_more_words(arguments: argparse.Namespace) -> None:
    if arguments.overrides:
        raise UserError(f"{arguments.overrides[0]!r}: not of the form section.key=value")


def _run(arguments: argparse.Namespace, overrides: list[str]) -> int:
    resume: Path | None = arguments.resume
    if resume is not None:
        if not (resume / "config.yaml").is_file():
            raise UserError(f"--resume {resume}: not a run folder (it has no config.yaml)")
        arguments.config.insert(0, resume / "config.yaml")
    config = _load(arguments, overrides)
    check_paths(config)
    # Only this command needs Ray, which takes seconds to import.
    from actors.run import run

    return run(config, None if resume is None else resume.resolve())


def _submit(arguments: argparse.Namespace, overrides: list[str]) -> int:
    config = _load(arguments, overrides)
    # Ray reads it when it is imported, and would otherwise come without its token.
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    from actors.submit import submit_run

    return submit_run(config, arguments.config, overrides, arguments.address, not arguments.no_follow)


def _config_show(arguments: argparse.Namespace, overrides: list[str]) -> int:
    _no_more_words(arguments)
    sys.stdout.write(resolved_yaml(load(arguments.config, overrides).config))
    return 0


def _config_validate(arguments: argparse.Namespace, overrides: list[str]) -> int:
    check_paths(_load(arguments, overrides))
    print(f"{', '.join(str(file) for file in arguments.config)}: fine")
    return 0


def _config_schema(arguments: argparse.Namespace, overrides: list[str]) -> int:
    print(json.dumps(Config.model_json_schema(), indent=2))
    return 0


def _simulate(arguments: argparse.Namespace, overrides: list[str]) -> int:
    _no_more_words(arguments)
    preset = [] if arguments.config else simulate.PRESET
    return simulate.run(load(arguments.config, [*preset, *overrides]).config, arguments)


def _status(arguments: argparse.Namespace, overrides: list[str]) -> int:
    status = fetch_status(status_address(arguments.run))
    print(json.dumps(status, indent=2) if arguments.json else "\n".join(status_lines(status)))
    return 0


def _trajectories_list(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from rich.console import Console

    from service.trajectories import find_run, load_records
    from service.trajectory_views import print_list

    console = Console(width=None if sys.stdout.isatty() else PIPED_WIDTH)
    print_list(console, load_records(find_run(arguments.run))[-arguments.last :])
    return 0


def _trajectories_show(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from rich.console import Console

    from service.trajectories import find_record, find_run, load_records
    from service.trajectory_views import print_record

    folder = find_run(arguments.run)
    record = find_record(load_records(folder), arguments.id)
    print_record(Console(), record, *_how_to_show(folder))
    return 0


def _trajectories_export(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from service.trajectories import find_run, load_records
    from service.trajectory_views import html_page

    folder = find_run(arguments.run)
    records = load_records(folder)[-arguments.last :]
    output = arguments.output or folder / "trajectories.html"
    output.write_text(html_page(f"Trajectories of {folder.name}", records, *_how_to_show(folder)), "utf-8")
    print(f"{len(records)} trajectories written to {output}")
    return 0


def _how_to_show(folder: Path) -> tuple[int, Callable[[Sequence[int]], list[str]]]:
    """The staleness bound of a run, and its tokenizer's words."""
    from service.rollout.tokenizer import load_tokenizer
    from service.trajectory_views import pieces

    config = load([folder / "config.yaml"], []).config
    tokenizer = load_tokenizer(config.model.path or folder / "model")
    return config.buffer.max_staleness, partial(pieces, lambda ids: str(tokenizer.decode(ids)))
