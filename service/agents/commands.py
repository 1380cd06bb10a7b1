"""Runs a command once for each trajectory. A child process runs one command after the other:

folder with the template's and the row's files --> command --> its output --> score --> folder removed

A command has its own process group, folder, resource limits and time limit. They contain mistakes, not attacks: a
command that needs a sandbox must start bubblewrap, podman or Harbor itself. If a child process is late, fails or loses
its parent, its keeper (`service.rollout.child_main`) ends it and all processes that the command started.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from math import ceil
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

from service.errors import in_one_line
from service.handoff.group_bytes import TRANSCRIPT_BYTES
from service.handoff.steps.values import NEEDED, is_reward
from service.rollout.child_main import PR_SET_CHILD_SUBREAPER, end_descendants, serve_child
from service.rollout.child_process import ChildDied, ChildProcesses, ChildRaised
from service.rollout.environment import AgentSession, OversizedOutput, Task
from service.rollout.user_errors import describe_error
from service.user_code import enter_user_folder, import_user_module

if TYPE_CHECKING:  # child processes do not need it
    from service.config.rollout import CommandConfig

log = logging.getLogger(__name__)

WORK, TEMPORARY, PROMPT, QUESTION, OUTPUT = "work", "tmp", "prompt.txt", "question.json", "output"
"""Names in the trajectory's folder: the command's current folder and TMPDIR, its prompt, the scoring command's input,
and what the command prints."""
FILES = "files"
"""Column of a row with the command's files: a text for each path in the command's folder."""
KEPT_VARIABLES = {"PATH": os.defpath, "LANG": "C.UTF-8"}
"""Environment variables that a command inherits from Baton's process, each with its default."""
PLACEHOLDER = re.compile(r"\{(\w+)\}")
LIMITED = """echo 1000 2>/dev/null >/proc/self/oom_score_adj
ulimit -c 0 && ulimit -f "$1" && ulimit -d "$2" && shift 2 && exec "$@\""""
"""Shell commands that set limits, then run the agent's command. If memory runs out, the kernel kills this process
first."""
SIGNALLED, SIGNALS = 128, range(129, 128 + signal.NSIG)
"""An exit code in `SIGNALS` is `SIGNALLED` plus the number of the signal that ended the command."""
REMOVE_SECONDS = 600.0
AROUND_SECONDS = 300.0
"""Time limit, in seconds, to fill and to remove a trajectory's folder."""
MAX_ANSWER_BYTES = 1 << 20
"""Maximum bytes of a child process's answer, whose transcript is bounded."""


class Failed(Exception):
    """Raised if the trajectory has failed; the message is the reason."""


class Finished(NamedTuple):
    """Result of one run of the command."""

    reward: float | None
    """The score; None if no score is configured, or the run failed."""
    status: str
    """`ok`, or `failed`. A failed run says nothing about the policy."""
    reason: str
    """Why the run failed, or a note that it reached its time limit; otherwise empty."""
    info: Mapping[str, float]
    """How long the run took, in seconds."""
    transcript: str
    """The command's stdout and stderr, without the key; the middle of a long output is left out."""
    exit_code: int | None = None
    """The exit code, or 128 + the signal that ended the command; None: it reached its time limit, or did not start."""


class CommandAgent:
    """The agent of one trajectory: it runs the command. It has no `close`, because `AgentRunner` ends all commands."""

    def __init__(self, runner: AgentRunner) -> None:
        self._runner = runner

    async def play(self, session: AgentSession, task: Task, seed: int) -> None:
        """Run the command, and finish the session with the score. If there is no score, the reward that the agent
        posted counts."""
        finished = await self._runner.run(task, session.base_url, session.key, seed)
        session.finish(**finished._asdict())


class AgentRunner:
    """Runs the commands of one generator."""

    def __init__(self, settings: CommandConfig) -> None:
        self._limits = settings.limits
        self._settings = settings.model_dump(mode="json")
        self._seconds = settings.limits.seconds + settings.limits.score_seconds + AROUND_SECONDS
        self._processes = ChildProcesses(__name__, MAX_ANSWER_BYTES)

    def make(self) -> CommandAgent:
        """An agent for one trajectory."""
        return CommandAgent(self)

    async def run(self, task: Task, base_url: str, key: str, seed: int) -> Finished:
        """Run the command for a task, and return its result. The command calls the policy at `base_url`
        (`http://HOST:PORT/.../v1`) with the session's `key`."""
        root = Path(tempfile.mkdtemp(prefix="baton-agent-"))
        asked = {"settings": self._settings, "task": asdict(task), "root": str(root), "base_url": base_url}
        process = await self._processes.take()
        try:
            async with asyncio.timeout(self._seconds):
                answer = await process.ask({**asked, "key": key, "seed": seed})
        except TimeoutError:
            reason = f"there was no score after {self._seconds:g} s"
        except (ChildDied, ChildRaised, OversizedOutput) as error:
            reason = str(error).replace(key, "[key]")
            if isinstance(error, ChildDied) and error.code == -signal.SIGALRM:
                limit = self._limits.score_seconds
                reason = f"{self._settings['score']} was ended at limits.score_seconds ({limit:g})"
        else:
            return Finished(**answer)
        finally:
            self._processes.give_back(process)
            if root.exists():
                await process.ended()
                await asyncio.to_thread(remove, root)
        return Finished(None, "failed", in_one_line(reason), {}, "")

    async def close(self) -> None:
        """End all runs."""
        await self._processes.close()


class _Trajectory:
    def __init__(self, request: Mapping[str, Any]) -> None:
        self._settings = request["settings"]
        self._limits: Mapping[str, Any] = self._settings["limits"]
        task = request["task"]
        self._task = Task(**task | {"prompt": tuple(task["prompt"]), "tools": tuple(task["tools"])})
        self._prompt = "\n\n".join(message["content"] for message in self._task.prompt)
        self._base_url, self._key, self._seed = request["base_url"], request["key"], request["seed"]
        self.root = Path(request["root"])
        self._folder = self.root / WORK

    def play(self) -> Finished:
        """Run the command and score its result."""
        transcript, reward, status, code = "", None, "ok", None
        info: dict[str, float] = {}
        try:
            self._fill_folder()
            began = monotonic()
            code = self._run_agent()
            info["seconds"] = round(monotonic() - began, 3)
            transcript = _read_output(self.root / OUTPUT).replace(self._key, "[key]")
            if code:
                raise Failed(_why(code))
            reason = f"it was ended at limits.seconds ({self._limits['seconds']:g})" if code is None else ""
            if not self._folder.is_dir():
                raise Failed("it removed its folder")
            reward = self._score(transcript)
        except Failed as failed:
            status, reason = "failed", str(failed).replace(self._key, "[key]")
        return Finished(reward, status, reason, info, transcript, code)

    def _fill_folder(self) -> None:
        """Make the folder with the template's files, the row's files and the prompt."""
        files = self._task.extra_info.get(FILES, {})
        if not isinstance(files, Mapping) or not all(isinstance(text, str) for text in files.values()):
            raise Failed(f"the row's {FILES} must be an object of paths with texts")
        try:
            (self.root / TEMPORARY).mkdir()
            if self._settings["workdir"] is None:
                self._folder.mkdir()
            else:
                shutil.copytree(self._settings["workdir"], self._folder, symlinks=True)
            inside = self._folder.resolve()
            for name, text in files.items():
                path = self._folder / name
                if not path.resolve().is_relative_to(inside):
                    raise Failed(f"the row's file {name!r:.200} is outside of the folder")
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
            (self.root / PROMPT).write_text(self._prompt, encoding="utf-8")
        except (OSError, ValueError, RuntimeError, shutil.Error) as error:  # RuntimeError: a link loop
            raise Failed(f"its folder cannot be made: {error!s:.500}") from error

    def _run_agent(self) -> int | None:
        """Run the command with the address and the key of its session. Returns its exit code as `_run` does."""
        seed, url = str(self._seed), self._base_url
        values = {"prompt": self._prompt, "prompt_file": str(self.root / PROMPT), "folder": str(self._folder)}
        values |= {"base_url": url, "seed": seed}
        words: Sequence[str] = self._settings["command"]
        named = {name for word in words for name in PLACEHOLDER.findall(word)}
        variables = {"BATON_SEED": seed} | {
            name: filled(text, values) for name, text in self._settings["variables"].items()
        }
        variables |= {"OPENAI_BASE_URL": url, "ANTHROPIC_BASE_URL": url.removesuffix("/v1")}
        variables |= dict.fromkeys(("OPENAI_API_KEY", "ANTHROPIC_API_KEY"), self._key)
        stdin = Path(os.devnull) if named & {"prompt", "prompt_file"} else self.root / PROMPT
        return self._run([filled(word, values) for word in words], stdin, variables, self._limits["seconds"])

    def _score(self, transcript: str) -> float | None:
        score, seconds = self._settings["score"], self._limits["score_seconds"]
        if score is None:
            return None
        if isinstance(score, str):
            return self._call(score, transcript)
        question = {"task": asdict(self._task), "folder": str(self._folder), "transcript": transcript}
        (self.root / QUESTION).write_text(json.dumps(question), encoding="utf-8")
        code = self._run(score, self.root / QUESTION, {}, seconds)
        if code is None:
            raise Failed(f"its score was ended at limits.score_seconds ({seconds:g})")
        if code in SIGNALS:
            raise Failed(f"its score failed: {_why(code)}")
        return 0.0 if code else _last_number(_read_output(self.root / OUTPUT))

    def _call(self, score: str, transcript: str) -> float:
        """The score that a function gives. If the function exceeds `limits.score_seconds`, this process is ended."""
        module, _, name = score.partition(":")
        signal.alarm(ceil(self._limits["score_seconds"]))
        try:
            number = getattr(import_user_module(module), name)(self._task, self._folder, transcript)
        except (Exception, SystemExit) as error:  # a user's function may raise anything
            raise Failed(f"{score} raised {describe_error(error)}") from error
        finally:
            signal.alarm(0)
        return _reward(number)

    def _run(self, command: Sequence[str], stdin: Path, variables: Mapping[str, str], seconds: float) -> int | None:
        """Run a command in the folder, then end all processes that it left. Returns its exit code, or 128 + the number
        of the signal that ended it; None if the command was ended after `seconds`."""
        kept = {name: os.environ.get(name, default) for name, default in KEPT_VARIABLES.items()}
        own = {"HOME": str(self._folder), "TMPDIR": str(self.root / TEMPORARY)}
        file_blocks, memory_kb = self._limits["file_bytes"] // 512, self._limits["memory_bytes"] // 1024
        words = ["sh", "-c", LIMITED, "sh", str(file_blocks), str(memory_kb), *command]
        try:
            with stdin.open("rb") as given, (self.root / OUTPUT).open("wb") as output:
                process = subprocess.Popen(
                    words,
                    stdin=given,
                    stdout=output,
                    stderr=output,
                    cwd=self._folder,
                    env={**kept, **own, **variables},
                    start_new_session=True,
                )
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise Failed(f"{command[0]}: cannot be started: {why}") from error
        with suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
        code = process.poll()
        with suppress(ProcessLookupError):  # the whole group has ended
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        end_descendants()  # processes that left the group
        return SIGNALLED - code if code is not None and code < 0 else code


def filled(text: str, values: Mapping[str, str]) -> str:
    """The text with each placeholder replaced by its value. Values are not searched for placeholders."""
    return PLACEHOLDER.sub(lambda found: values.get(found[1], found[0]), text)


def remove(folder: Path) -> None:
    """Remove a folder with all its content, however deep. Links are not followed; a failure is only logged."""
    for command in (["rm", "-rf"], ["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
        if os.path.lexists(folder):
            subprocess.run([*command, "--", folder], stderr=subprocess.DEVNULL, timeout=REMOVE_SECONDS, check=False)
    if os.path.lexists(folder):
        log.warning("%s could not be removed", folder)


def _read_output(file: Path) -> str:
    """The output of a command; if it exceeds `TRANSCRIPT_BYTES`, the middle is left out."""
    size, kept = file.stat().st_size, TRANSCRIPT_BYTES
    with file.open("rb") as output:
        if size <= kept:
            return output.read().decode(errors="replace")
        head = output.read(kept // 4)
        output.seek(len(head) - kept, os.SEEK_END)
        tail = output.read()
    return f"{head.decode(errors='replace')}\n[{size - kept} bytes left out]\n{tail.decode(errors='replace')}"


def _why(code: int) -> str:
    return f"it was ended by signal {code - SIGNALLED}" if code in SIGNALS else f"its exit code was {code}"


def _last_number(output: str) -> float:
    """The number in the last line of a scoring command's output; 1 if the line is no number."""
    last = next((line for line in reversed(output.split("\n")) if line.strip()), "")
    with suppress(ValueError):
        return _reward(float(last))
    return 1.0


def _reward(score: Any) -> float:
    try:
        number = float(score)
    except (TypeError, ValueError, OverflowError):
        number = float("nan")
    if not is_reward(number):
        raise Failed(f"its score is {score!r:.80}; {NEEDED} is needed")
    return number


def main() -> None:
    """Play one trajectory after the other until stdin closes."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    enter_user_folder()

    async def answer(request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Play a trajectory; the answer has the fields of `Finished`."""
        trajectory = _Trajectory(request)
        try:
            return trajectory.play()._asdict()
        finally:
            remove(trajectory.root)

    serve_child(answer)
