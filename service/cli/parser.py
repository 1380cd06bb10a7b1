"""The command `baton`."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from service.cli import commands, init
from service.cli.recipes import config_file
from service.errors import BatonError
from service.observe.version import installed_version

PLAIN = ("trajectories", "status")
"""Commands without settings, where a word with = is a word like any other: `group=812/sample=3/attempt=0`."""
_OVERRIDE = re.compile(r"(--)?[A-Za-z_]\w*(\.\w+)*=.*", re.DOTALL)
_OVERRIDE_KEY = re.compile(r"--[A-Za-z_]\w*(\.\w+)+")

RAW = argparse.RawDescriptionHelpFormatter

ABOUT = """\
Baton trains language models on multi-turn tasks by asynchronous reinforcement learning:
vLLM generators stream steps into a buffer, an FSDP trainer learns from them, weights flow back.

    prompts --claim--> GENERATOR --submit--> BUFFER --lease--> TRAINER --publish--> weights --> GENERATOR
"""

EXAMPLES = """\
examples:
  baton init my-task                                     # a folder to begin a task of your own
  baton run --config configs/quickstart.yaml
  baton run --config configs/quickstart.yaml trainer.lr=1e-4 run.seed=1
  baton run --config base.yaml --config mine.yaml        # the second file is merged over the first
  baton submit --config configs/quickstart.yaml          # the same as a job on a Ray cluster
  baton eval runs/quickstart data.eval_make_rows=200     # a run, a checkpoint or a model on its evaluation sets
  baton config validate --config mine.yaml               # what is wrong with it, without starting anything
  baton config show --config mine.yaml buffer.lookahead=0
  baton config schema > config.schema.json               # for completion in an editor
  baton status runs/quickstart                           # what a run is doing now
  baton trajectories list runs/quickstart                # what the rollouts say

`baton COMMAND --help` says more about a command. A setting is written section.key=value, in any number.
"""

RUN_ABOUT = """\
Run a training: starts a Ray of its own unless RAY_ADDRESS names a cluster, prepares model and data, trains, writes the
run folder.
"""

RUN_EXAMPLES = """\
examples:
  baton run --config configs/quickstart.yaml
  baton run --config configs/quickstart.yaml buffer.lookahead=0        # strictly on-policy
  baton run --config mine.yaml model.path=models/qwen3-0.6b data.train=data/train.jsonl
  baton run --resume runs/quickstart                                   # go on where it was stopped or killed

exit code: 0 finished, 2 the input is wrong (one line says what), 1 the run failed, 128 + n stopped by signal n.
"""


EVAL_ABOUT = """\
Play the evaluation sets (data.eval, data.eval_make_rows) on a model, a run or a checkpoint, without training.
"""

EVAL_EXAMPLES = """\
examples:
  baton eval runs/gsm8k                                                # its final weights, or its newest checkpoint
  baton eval runs/gsm8k/checkpoints/step_40 data.eval_samples=8
  baton eval models/Qwen2.5-3B-Instruct --config configs/gsm8k.yaml --output before.json

A run brings its own configuration. The table has the mean reward, pass@k over data.eval_samples trajectories of each
prompt, turns and sampled tokens of a trajectory, and trajectories that were lost; --output writes the same as JSON.

exit code: 0 evaluated, 2 the input is wrong (one line says what), 1 an engine failed, 128 + n stopped by signal n.
"""

SUBMIT_NOTES = """\
The job works in a temporary copy of the current folder: configuration files must lie inside it, and run.dir should be
an absolute path (else the runs lie in the home of the node that it runs on). The cluster's token is read from
~/.ray/auth_token or RAY_AUTH_TOKEN. `ray job stop JOB` ends the run in order, with its final weights.
"""


CONFIG_EXAMPLES = """\
examples:
  baton config validate --config mine.yaml             # what is wrong, a line each; looks into data and model
  baton config show --config mine.yaml trainer.lr=1e-4   # what the run would be told, defaults included
  baton config schema > config.schema.json               # for completion in an editor
"""

STATUS_ABOUT = """\
Rates on the road, groups by state, tokens by fate, and who waits for what. The same as JSON at /status, as a page with
live charts at /, for Prometheus at /metrics. Of a run that has ended: how.
"""

STATUS_EXAMPLES = """\
examples:
  baton status quickstart                # the run of that name in runs/
  baton status runs/quickstart-2
  baton status 127.0.0.1:9400 --json
"""

TRAJECTORIES_EXAMPLES = """\
examples:
  baton trajectories list runs/quickstart
  baton trajectories show runs/quickstart                # the newest that was trained; or name one
  baton trajectories export-html runs/quickstart --last 20
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. Wrong input is one clear line and code 2."""
    if argv is None and os.getcwd() not in sys.path:
        # As with `python -m`: modules of one's own, such as environments, lie where the command is typed.
        sys.path.insert(0, os.getcwd())
    words, overrides = split_overrides(sys.argv[1:] if argv is None else argv)
    arguments = _parser(words[0] if words else "").parse_args(words)
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
    except OSError as error:
        print(f"baton: {error.filename or 'output'!s:.200}: {error.strerror or error}", file=sys.stderr)
        return 2
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


def _parser(typed: str) -> argparse.ArgumentParser:
    """The parser; the two commands that describe themselves are loaded only where they are what was typed."""
    parser = argparse.ArgumentParser("baton", description=ABOUT, epilog=EXAMPLES, formatter_class=RAW)
    parser.add_argument("--version", action="version", version=f"baton {installed_version()}")
    added = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for add in (_add_init, _add_run, _add_eval, _add_submit, _add_config_actions, _add_status):
        add(added)
    _add_simulate(added, typed == "simulate")
    _add_replay(added, typed == "replay")
    _add_trajectories(added)
    return parser


def _add_init(added: Any) -> None:
    task = added.add_parser(
        "init",
        help="write a folder to begin a task of your own",
        description=init.ABOUT,
        epilog=init.EXAMPLES,
        formatter_class=RAW,
    )
    init.add_arguments(task)
    task.set_defaults(command=commands.init)


def _add_run(added: Any) -> None:
    run = added.add_parser(
        "run", help="run a training", description=RUN_ABOUT, epilog=RUN_EXAMPLES, formatter_class=RAW
    )
    _add_config(run)
    run.add_argument(
        "--resume",
        type=Path,
        metavar="RUN",
        help="go on from the newest checkpoint of a run folder, with its configuration",
    )
    run.set_defaults(command=commands.in_ray, in_ray="run")


def _action(actions: Any, name: str, text: str) -> argparse.ArgumentParser:
    """One of a command's actions, described in a line."""
    parser: argparse.ArgumentParser = actions.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
    return parser


def _add_submit(added: Any) -> None:
    submit = added.add_parser(
        "submit",
        help="run a training as a job on a Ray cluster",
        description="Submit `baton run` as a Ray job, again while the cluster is still starting, and show its output.",
        epilog=SUBMIT_NOTES,
        formatter_class=RAW,
    )
    _add_config(submit)
    submit.add_argument("--address", metavar="URL", help="of the cluster's dashboard (default: what Ray finds)")
    submit.add_argument("--no-follow", action="store_true", help="return at once instead of showing the output")
    submit.set_defaults(command=commands.in_ray, in_ray="submit")


def _add_config_actions(added: Any) -> None:
    config = added.add_parser(
        "config",
        help="show or check a configuration, or print its schema",
        description="Configurations are YAML files, merged in order, then settings; nothing is started here.",
        epilog=CONFIG_EXAMPLES,
        formatter_class=RAW,
    )
    actions = config.add_subparsers(title="actions", metavar="ACTION", required=True)
    show = _action(actions, "show", "the resolved configuration as YAML, defaults included")
    _add_config(show)
    show.set_defaults(command=commands.config_show)
    validate = _action(actions, "validate", "check a configuration without starting anything")
    _add_config(validate)
    validate.set_defaults(command=commands.config_validate)
    schema = _action(actions, "schema", "the JSON schema of the configuration")
    schema.set_defaults(command=commands.config_schema)


def _add_simulate(added: Any, whole: bool) -> None:
    simulation = added.add_parser(
        "simulate",
        help="what a configuration would do, without GPUs, under a virtual clock",
        formatter_class=RAW,
    )
    if whole:
        from service.simulate import command as simulate

        simulation.description, simulation.epilog = simulate.ABOUT, simulate.EXAMPLES
        _add_config(simulation)
        simulate.add_arguments(simulation)
        simulation.set_defaults(command=commands.simulate)


def _add_replay(added: Any, whole: bool) -> None:
    again = added.add_parser(
        "replay", help="one mini-batch of a run, formed again from its journal", formatter_class=RAW
    )
    if whole:
        from service.cli import replay

        again.description, again.epilog = replay.ABOUT, replay.EXAMPLES
        replay.add_arguments(again)
        again.set_defaults(command=commands.replay)


def _add_eval(added: Any) -> None:
    evaluation = added.add_parser(
        "eval",
        help="evaluate a model, a run or a checkpoint",
        description=EVAL_ABOUT,
        epilog=EVAL_EXAMPLES,
        formatter_class=RAW,
    )
    evaluation.add_argument("path", type=Path, metavar="PATH", help="a Hugging Face folder, a run or a checkpoint")
    evaluation.add_argument("--output", type=Path, metavar="FILE", help="write the results here, as JSON")
    _add_config(evaluation)
    evaluation.set_defaults(command=commands.in_ray, in_ray="eval")


def _add_status(added: Any) -> None:
    status = added.add_parser(
        "status",
        help="what a run is doing now, or how it ended",
        description=STATUS_ABOUT,
        epilog=STATUS_EXAMPLES,
        formatter_class=RAW,
    )
    status.add_argument("run", metavar="URL-OR-RUN", help="http://host:port, a run folder, or the name of a run")
    status.add_argument("--json", action="store_true", help="the /status document as it is served")
    status.set_defaults(command=commands.status)


def _add_trajectories(added: Any) -> None:
    parser = added.add_parser(
        "trajectories",
        help="look at what a run's rollouts said",
        description="A run keeps some trajectories of each mini-batch; see run.trajectories_per_step.",
        epilog=TRAJECTORIES_EXAMPLES,
        formatter_class=RAW,
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    listed = _action(actions, "list", "a line for each kept trajectory")
    listed.set_defaults(command=commands.trajectories_list)
    shown = _action(actions, "show", "one trajectory, with what carries loss in colour")
    shown.set_defaults(command=commands.trajectories_show)
    exported = _action(actions, "export-html", "one self-contained page of trajectories")
    exported.set_defaults(command=commands.trajectories_export)
    for action in (listed, shown, exported):
        action.add_argument("run", metavar="RUN", help="a run folder, or the name of a run")
    named = "such as group=812/sample=3/attempt=0, or 812; without it the newest that was trained"
    shown.add_argument("id", metavar="ID", nargs="?", help=named)
    exported.add_argument("--output", type=Path, metavar="FILE", help="default: trajectories.html in the run folder")
    for action in (listed, exported):
        action.add_argument("--last", type=int, default=50, metavar="N", help="the last N kept ones (default 50)")


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config", action="append", type=config_file, default=[], metavar="FILE",
        help="a YAML file; given again, later files are merged over earlier ones; configs/NAME.yaml is also found "
        "where Baton is installed",
    )  # fmt: skip
    # Taken out of the words before parsing; named here so that --help shows it.
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="set one value over the files")
