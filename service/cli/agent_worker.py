"""The command `baton agent-worker`: runs agents on a machine without Ray."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
from urllib.parse import urlsplit

from service.errors import UserError
from service.run.arguments import count

ABOUT = """\
Run agents on a machine without Ray: claim sessions from endpoints of a run, run a command for each, finish them. The
worker key is read from the environment variable BATON_WORKER_KEY. The run has env.name=agent, env.workers=outside, a
fixed agents.port and the same key; its first generator listens there, the next one on the next port.
"""

EXAMPLES = """\
examples:
  baton agent-worker http://10.0.0.5:8400 --command my-agent --model policy "{prompt}"
  baton agent-worker http://10.0.0.5:8400 --concurrent 8 --config configs/mine.yaml
  baton agent-worker http://10.0.0.5:8400 env.score=my_scores:score env.trusted_modules=[my_scores] --command my-agent

The settings of the section env (command, workdir, score, variables, network, limits) count, as in a run with
env.name=agent. What follows --command belongs to the command. Ctrl-C aborts the open sessions.

exit code: 128 + n stopped by signal n, 2 the input is wrong or an endpoint refuses the key (one line says what).
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command, other than those of its configuration."""
    parser.add_argument("endpoints", nargs="+", metavar="URL", help="an endpoint of the run, such as http://HOST:PORT")
    parser.add_argument(
        "--concurrent", type=count, default=1, metavar="N", help="sessions of each endpoint at once (default 1)"
    )
    parser.add_argument(
        "--command", dest="program", nargs=argparse.REMAINDER, help="the program and its arguments, at the end"
    )


def run(arguments: argparse.Namespace, overrides: list[str]) -> int:
    """Run the worker until a signal arrives; returns 128 + the signal's number."""
    from service.agents.runner.runner import AgentRunner
    from service.agents.session_keys import WORKER_KEY
    from service.agents.worker import work
    from service.config import load
    from service.config.checks import check_command_only
    from service.config.command import AGENT, CommandConfig
    from service.config.paths import check_command_paths
    from service.rollout.check_inputs import check_score

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    key = os.environ.pop(WORKER_KEY, "")
    if not key:
        raise UserError(f"{WORKER_KEY} is not set; it holds the worker key of the run")
    for url in arguments.endpoints:
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
            raise UserError(f"{url}: no address of an endpoint; give http://HOST:PORT")
    given = [f"env.command={json.dumps(arguments.program)}"] if arguments.program else []
    config, source = load(arguments.config, [f"env.name={AGENT}", *overrides, *given, "env.workers=here"])
    check_command_only(config, source)
    check_command_paths(config)
    check_score(config.env)
    settings = {name: getattr(config.env, name) for name in CommandConfig.model_fields}
    command = CommandConfig(**settings | {"workdir": config.env.workdir and config.env.workdir.absolute()})

    async def until_stopped() -> int:
        loop, runner, stopped = asyncio.get_running_loop(), AgentRunner(command), []
        working = asyncio.create_task(work(arguments.endpoints, key, runner, arguments.concurrent))

        def stop(number: int) -> None:
            stopped.append(number)
            working.cancel()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop, number)
        try:
            await working
        except asyncio.CancelledError:
            if not stopped:
                raise
        finally:
            await runner.close()
        return 128 + stopped[0]

    return asyncio.run(until_stopped())
