"""The command `baton`: its commands, their arguments, and what becomes of errors."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from service.cli import agent_worker, commands, help_texts, init, logs, profile, timeline
from service.cli.recipes import config_file
from service.errors import BatonError, printable
from service.version import installed_version

WITHOUT_SETTINGS = ("trajectories", "status")
"""Commands in which a word with = is no setting: `group=812/sample=3/attempt=0`."""

_OVERRIDE = re.compile(r"(--)?[A-Za-z_]\w*(\.\w+)*=.*", re.DOTALL)
_OVERRIDE_KEY = re.compile(r"--[A-Za-z_]\w*(\.\w+)+")

RAW = argparse.RawDescriptionHelpFormatter
RUN_HELP = "a run folder, or the name of a run"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. Wrong input prints one line and returns 2."""
    _open_closed_files()
    words, overrides = split_overrides(sys.argv[1:] if argv is None else argv)
    arguments = _parser(words[0] if words else "").parse_args(words)
    try:
        return int(arguments.command(arguments, overrides))
    except BatonError as error:
        for line in printable(str(error)).splitlines():
            print(f"baton: {line}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        # The reader of a pipe, such as `head`, has closed it.
        sys.stderr.close()
        return 1
    except OSError as error:
        print(printable(f"baton: {error.filename or 'output'!s:.200}: {error.strerror or error}"), file=sys.stderr)
        return 2


def _open_closed_files() -> None:
    """Open stdin, stdout and stderr where they are closed (`baton ... >&-`): no other file may get their numbers."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            file = open(os.devnull, "r" if name == "stdin" else "w")  # noqa: SIM115 - until the process ends
            os.set_inheritable(file.fileno(), True)
            setattr(sys, name, file)


def split_overrides(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the command line into words for the parser and settings: `a.b=c`, `--a.b=c` and `--a.b c`.

    >>> split_overrides(["run", "--config", "a.yaml", "trainer.lr=1", "--run.seed", "3"])
    (['run', '--config', 'a.yaml'], ['trainer.lr=1', '--run.seed', '3'])
    """
    words: list[str] = []
    overrides: list[str] = []
    if argv and argv[0] in WITHOUT_SETTINGS:
        return list(argv), []
    rest = iter(argv)
    for word in rest:
        if word.startswith("--config="):
            words.append(word)
        elif word == "--config":
            words += [word, *islice(rest, 1)]
        elif word == "--command":
            words += [word, *rest]  # of `agent-worker`: another program's
        elif _OVERRIDE_KEY.fullmatch(word):
            overrides += [word, *islice(rest, 1)]
        elif _OVERRIDE.fullmatch(word):
            overrides.append(word)
        else:
            words.append(word)
    return words, overrides


def _parser(typed: str) -> argparse.ArgumentParser:
    """The parser; the modules of `plan`, `simulate` and `replay` are imported only when that command was typed."""
    parser = argparse.ArgumentParser(
        "baton", description=help_texts.ABOUT, epilog=help_texts.EXAMPLES, formatter_class=RAW
    )
    parser.add_argument("--version", action="version", version=f"baton {installed_version()}")
    added = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_init(added)
    _add_run(added)
    _add_eval(added)
    _add_export(added)
    _add_submit(added)
    _add_config(added)
    _add_status(added)
    _add_plan(added, typed == "plan")
    _add_scale(added)
    _add_simulate(added, typed == "simulate")
    _add_replay(added, typed == "replay")
    _add_logs(added)
    _add_trace(added)
    _add_profile(added)
    _add_agent_worker(added)
    _add_trajectories(added)
    return parser


def _command(
    added: Any, name: str, run: Callable[..., int] | None, summary: str, about: str = "", notes: str = ""
) -> argparse.ArgumentParser:
    """Add a command, or an action of one; without `about` its help begins with the summary."""
    about = about or f"{summary[0].upper()}{summary[1:]}."
    parser: argparse.ArgumentParser = added.add_parser(
        name, help=summary, description=about, epilog=notes, formatter_class=RAW
    )
    parser.set_defaults(command=run, name=name)
    return parser


def _actions(added: Any, name: str, summary: str, about: str, notes: str) -> Any:
    """Add a command that consists of actions."""
    parser = _command(added, name, None, summary, about, notes)
    return parser.add_subparsers(title="actions", metavar="ACTION", required=True)


def _add_init(added: Any) -> None:
    summary = "write a folder to begin a task of your own"
    init.add_arguments(_command(added, "init", init.run, summary, init.ABOUT, init.EXAMPLES))


def _add_run(added: Any) -> None:
    parser = _command(added, "run", commands.in_ray, "run a training", help_texts.RUN, help_texts.RUN_EXAMPLES)
    _add_settings(parser)
    resume = "continue a run from its newest checkpoint, with its configuration: its folder, name or store address"
    parser.add_argument("--resume", metavar="RUN", help=resume)


def _add_eval(added: Any) -> None:
    summary = "evaluate a model, a run or a checkpoint"
    parser = _command(added, "eval", commands.in_ray, summary, help_texts.EVAL, help_texts.EVAL_EXAMPLES)
    parser.add_argument("path", type=Path, metavar="PATH", help="a Hugging Face folder, a run folder or a checkpoint")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the results to this file, as JSON")
    _add_settings(parser)


def _add_export(added: Any) -> None:
    summary = "write the adapter of a run, alone or merged into its base"
    parser = _command(added, "export", commands.export, summary, help_texts.EXPORT, help_texts.EXPORT_EXAMPLES)
    parser.add_argument(
        "path", type=Path, metavar="PATH", help="the run folder of a run with model.lora, or a checkpoint"
    )
    parser.add_argument("output", type=Path, metavar="FOLDER", help="the folder to write, which must not exist yet")
    parser.add_argument("--merge", action="store_true", help="write a whole model, which needs no adapter")
    text = "set one value over the run's"
    parser.add_argument("overrides", nargs="*", default=[], metavar="section.key=value", help=text)


def _add_submit(added: Any) -> None:
    summary = "run a training as a job on a Ray cluster"
    parser = _command(added, "submit", commands.in_ray, summary, help_texts.SUBMIT, help_texts.SUBMIT_NOTES)
    _add_settings(parser)
    parser.add_argument("--address", metavar="URL", help="the cluster's dashboard (default: the one that Ray finds)")
    parser.add_argument("--no-follow", action="store_true", help="return at once instead of showing the output")


def _add_config(added: Any) -> None:
    summary = "show or check a configuration, or print its schema"
    actions = _actions(added, "config", summary, help_texts.CONFIG, help_texts.CONFIG_EXAMPLES)
    show = "print the resolved configuration as YAML, defaults included"
    _add_settings(_command(actions, "show", commands.config_show, show))
    _add_settings(_command(actions, "validate", commands.config_validate, "check a configuration, start nothing"))
    _command(actions, "schema", commands.config_schema, "print the JSON schema of the configuration")


def _add_status(added: Any) -> None:
    summary = "what a run is doing now, or how it ended"
    parser = _command(added, "status", commands.status, summary, help_texts.STATUS, help_texts.STATUS_EXAMPLES)
    named = f"http://host:port, {RUN_HELP} (default: the newest run in runs/)"
    parser.add_argument("run", metavar="URL-OR-RUN", nargs="?", help=named)
    parser.add_argument("--json", action="store_true", help="print the /status document")


def _add_scale(added: Any) -> None:
    summary = "ask a running run for more or fewer generators"
    parser = _command(added, "scale", commands.scale, summary, help_texts.SCALE, help_texts.SCALE_EXAMPLES)
    parser.add_argument("run", metavar="RUN", help=RUN_HELP)
    parser.add_argument("--engines", type=logs.count, metavar="N", required=True, help="how many, all together")


def _add_logs(added: Any) -> None:
    summary = "what the parts of a run print"
    logs.add_arguments(_command(added, "logs", logs.run, summary, logs.ABOUT, logs.EXAMPLES), RUN_HELP)


def _add_plan(added: Any, whole: bool) -> None:
    summary = "whether a configuration fits its GPUs, how fast it is, what binds, and the best split"
    parser = _command(added, "plan", commands.plan, summary)
    if whole:
        from service.plan import command as plan

        parser.description, parser.epilog = plan.ABOUT, plan.EXAMPLES
        _add_settings(parser)
        plan.add_arguments(parser)


def _add_profile(added: Any) -> None:
    summary = "profile the next optimizer steps of a running run"
    profile.add_arguments(_command(added, "profile", profile.run, summary, profile.ABOUT, profile.EXAMPLES), RUN_HELP)


def _add_trace(added: Any) -> None:
    summary = "write a run's timeline: who did what when, and waited for what"
    timeline.add_arguments(_command(added, "trace", timeline.run, summary, timeline.ABOUT, timeline.EXAMPLES), RUN_HELP)


def _add_simulate(added: Any, whole: bool) -> None:
    summary = "predict what a configuration would do, without GPUs, under a virtual clock"
    parser = _command(added, "simulate", commands.simulate, summary)
    if whole:
        from service.simulate import command as simulate

        parser.description, parser.epilog = simulate.ABOUT, simulate.EXAMPLES
        _add_settings(parser)
        simulate.add_arguments(parser)


def _add_replay(added: Any, whole: bool) -> None:
    parser = _command(added, "replay", None, "form a mini-batch of a run again from the run's journal")
    if whole:
        from service.cli import replay

        parser.description, parser.epilog = replay.ABOUT, replay.EXAMPLES
        parser.set_defaults(command=replay.run)
        replay.add_arguments(parser)


def _add_agent_worker(added: Any) -> None:
    summary = "run agents on a machine without Ray"
    parser = _command(added, "agent-worker", agent_worker.run, summary, agent_worker.ABOUT, agent_worker.EXAMPLES)
    agent_worker.add_arguments(parser)
    _add_settings(parser)


def _add_trajectories(added: Any) -> None:
    summary = "show what the policy wrote in a run"
    actions = _actions(added, "trajectories", summary, help_texts.TRAJECTORIES, help_texts.TRAJECTORIES_EXAMPLES)
    listed = _command(actions, "list", commands.trajectories_list, "print a line for each kept trajectory")
    shown = _command(actions, "show", commands.trajectories_show, "print a trajectory; tokens with loss are coloured")
    exported = _command(actions, "export-html", commands.trajectories_export, "write trajectories as an HTML page")
    slow = _command(actions, "slow", timeline.slow, "where the time of trajectories goes, and the slowest ones")
    for action in (listed, shown, exported, slow):
        action.add_argument("run", metavar="RUN", nargs="?", help=f"{RUN_HELP} (default: the newest run in runs/)")
    named = "such as group=812/sample=3/attempt=0, or 812 (default: the newest trained trajectory)"
    shown.add_argument("id", metavar="ID", nargs="?", help=named)
    slow.add_argument("id", metavar="ID", nargs="?", help="the calls of this one, of those that the timeline keeps")
    exported.add_argument("--output", type=Path, metavar="FILE", help="default: trajectories.html in the run folder")
    slow.add_argument("--last", type=logs.count, default=10, metavar="N", help="the N slowest (default 10)")
    for action in (listed, exported):
        action.add_argument(
            "--last", type=logs.count, default=50, metavar="N", help="the last N kept ones (default 50)"
        )


def _add_settings(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of a command that has a configuration."""
    text = (
        "a YAML file; given again, later files are merged over earlier ones; configs/NAME.yaml is also found where "
        "Baton is installed"
    )
    parser.add_argument("--config", action="append", type=config_file, default=[], metavar="FILE", help=text)
    # `split_overrides` takes the settings out before parsing; this argument shows them in --help.
    text = "set one value over the files"
    parser.add_argument("overrides", nargs="*", default=[], metavar="section.key=value", help=text)
