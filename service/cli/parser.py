"""The command `baton`: its subcommands, their arguments, and the handling of errors."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from itertools import islice
from typing import Any, NamedTuple, NoReturn

from service.cli.in_ray import in_ray
from service.cli.recipes import add_settings
from service.errors import BatonError, UserError, printable
from service.version import installed_version

ABOUT = """\
Baton trains language models on multi-turn tasks by asynchronous reinforcement learning:
vLLM generators stream steps into a buffer, FSDP trainers learn from them and send new weights back.

    prompts --claim--> GENERATOR --submit--> BUFFER --lease--> TRAINER --publish--> weights --> GENERATOR
"""

EXAMPLES = """\
examples:
  baton init my-task                                     # a folder to begin a task of your own
  baton run --config configs/quickstart.yaml
  baton run --config configs/quickstart.yaml trainer.lr=1e-4 run.seed=1
  baton run --config base.yaml --config mine.yaml        # the second file is merged over the first
  baton sft model.path=MODEL data.train=mine.jsonl       # supervised training, before RL
  baton eval runs/quickstart data.eval_make_rows=200     # evaluates a run, a checkpoint or a model
  baton config validate --config mine.yaml               # reports mistakes, starts nothing
  baton plan --config mine.yaml --gpu h100 --gpus 8      # whether it fits, and how long a step may take
  baton config show --config mine.yaml buffer.lookahead=0
  baton config schema > config.schema.json               # for completion in an editor
  baton status runs/quickstart                           # what a run is doing now
  baton logs runs/quickstart --follow                    # what its parts print
  baton trajectories list runs/quickstart                # what the policy wrote
  baton trace runs/quickstart                            # its timeline, for ui.perfetto.dev

`baton COMMAND --help` describes a command. Settings are written section.key=value, as many as you need.
"""


class Command(NamedTuple):
    """A command of `baton`, and the module that implements it. The module has ABOUT, EXAMPLES, `add_arguments(parser)`
    and `run(arguments, overrides)`. If it has no `run`, the function is a default of its subcommand's parser
    (`command`), or is in `actors.driver.commands`."""

    name: str
    summary: str
    module: str
    has_settings: bool = False
    """Whether the command takes configuration files and settings, in addition to its own arguments."""


COMMANDS = (
    Command("init", "write a folder to begin a task of your own", "service.cli.init"),
    Command("quickstart", "train a small model, in some minutes", "service.cli.quickstart"),
    Command("run", "run a training", "service.cli.train", True),
    Command("sft", "train a model on conversations, before RL", "service.cli.sft", True),
    Command("eval", "evaluate a model, a run or a checkpoint", "service.cli.evaluate", True),
    Command("export", "write the weights of a run or a checkpoint as a Hugging Face folder", "service.cli.export"),
    Command("config", "show or check a configuration, or print its schema", "service.cli.configuration"),
    Command("status", "what a run is doing now, or how it ended", "service.cli.status"),
    Command("logs", "what the parts of a run print", "service.cli.logs"),
    # Optional commands: without a command's line and folder, everything else works.
    Command("plan", "whether a configuration fits, and how long a step may take", "service.plan.plan_command", True),
    Command("trace", "write a run's timeline: who did what when", "service.trace.trace_command"),
    Command("trajectories", "show what the policy wrote in a run", "service.trace.trajectories_command"),
    Command("agent-try", "try an agent: what it calls, and what would be trained", "service.cli.agent_try", True),
)

OTHER_NAMES = {"train": "run", "start": "run", "resume": "run --resume RUN", "validate": "config validate"}
"""Names of commands in other systems, with Baton's name of each."""

WITH_SETTINGS = {command.name for command in COMMANDS if command.has_settings} | {"config", "export", "quickstart"}
WITHOUT_SETTINGS = ("trajectories", "status")
"""Commands in which a word with `=` is no setting, but for example a trajectory's id
(`group=812/sample=3/attempt=0`)."""

_DASHED = re.compile(r"--[A-Za-z_]\w*(\.[\w-]+)+(=.*)?", re.DOTALL)
_OVERRIDE = re.compile(r"[A-Za-z_]\w*(\.[\w-]+)*=.*", re.DOTALL)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. For wrong input it prints one line and returns 2."""
    _open_closed_files()
    try:
        words, overrides = split_overrides(sys.argv[1:] if argv is None else argv)
        if words and words[0] not in ("-h", "--help", "--version"):
            _check_known(words[0])
        arguments = _parser(words[0] if words else "").parse_args(words)
        if overrides and arguments.name not in WITH_SETTINGS:
            raise UserError(
                f"{overrides[0]}: baton {arguments.name} takes no settings; see baton {arguments.name} --help"
            )
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


def _check_known(typed: str) -> None:
    names = [command.name for command in COMMANDS]
    if typed not in names:
        near = OTHER_NAMES.get(typed) or next(iter(difflib.get_close_matches(typed, names, n=1)), "")
        hint = f"did you mean {near}? " if near else ""
        raise UserError(f"{typed or repr('')}: no such command; {hint}baton --help lists the commands")


def _open_closed_files() -> None:
    """Open stdin, stdout and stderr if they are closed (`baton ... >&-`), so that no other file gets their numbers."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            file = open(os.devnull, "r" if name == "stdin" else "w")  # noqa: SIM115 - until the process ends
            os.set_inheritable(file.fileno(), True)
            setattr(sys, name, file)


def split_overrides(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the command line into words for the parser, and settings.

    >>> split_overrides(["run", "--config", "a.yaml", "trainer.lr=1"])
    (['run', '--config', 'a.yaml'], ['trainer.lr=1'])
    """
    words: list[str] = []
    overrides: list[str] = []
    if argv and argv[0] in WITHOUT_SETTINGS:
        return [_from_home(word) for word in argv], []
    rest = iter(argv)
    for word in rest:
        if word.startswith("--config="):
            words.append(_from_home(word))
        elif word == "--config":
            words += [word, *map(_from_home, islice(rest, 1))]
        elif _OVERRIDE.fullmatch(word):
            overrides.append(word)
        elif _DASHED.fullmatch(word):
            setting = word.removeprefix("--").partition("=")[0]
            raise UserError(f"{word}: a setting has no dashes before it: {setting}=VALUE")
        else:
            words.append(_from_home(word))
    return words, overrides


def _from_home(word: str) -> str:
    """The word with `~` replaced by the home folder if the shell has left it, as in `--output=~/run.json`."""
    option, equals, path = word.rpartition("=")
    return f"{option}{equals}{os.path.expanduser(path)}"


class _Parser(argparse.ArgumentParser):
    """A parser whose errors, and those of its subcommands' parsers, take one line."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:  # the parser of the subcommand refuses them here
            options = re.findall(r"--[\w-]+", self.format_usage())
            near = difflib.get_close_matches(unknown[0].partition("=")[0], options, n=1)
            self.error(f"unrecognized arguments: {' '.join(unknown)}" + (f" (did you mean {near[0]}?)" if near else ""))
        return found, unknown

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {printable(message)}; see {self.prog} --help\n")


def _parser(typed: str) -> argparse.ArgumentParser:
    """The parser; imports only the module of the command that was typed."""
    plain = argparse.RawDescriptionHelpFormatter
    there = {command.name for command in COMMANDS}
    lines = EXAMPLES.splitlines()
    examples = "\n".join(line for line in lines if not line.startswith("  baton ") or line.split()[1] in there)
    parser = _Parser("baton", description=ABOUT, epilog=examples, formatter_class=plain)
    parser.add_argument("--version", action="version", version=f"baton {installed_version()}")
    added = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        page = added.add_parser(command.name, help=command.summary, formatter_class=plain)
        if command.name == typed:
            module = import_module(command.module)
            page.description, page.epilog = module.ABOUT, module.EXAMPLES
            page.set_defaults(command=getattr(module, "run", in_ray), name=command.name)
            module.add_arguments(page)
            if command.has_settings:
                add_settings(page)
    return parser
