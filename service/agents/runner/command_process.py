"""The command process: runs one trajectory of a command after the other, from making the folder to scoring.

folder with the template's and the row's files --> command --> its output --> score --> folder removed
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

from service.agents.runner.bounded import CommandEnd, run_command
from service.agents.runner.forward import on_loopback, port_of
from service.agents.runner.sandbox import Launch, NotStarted, namespaces_refused
from service.handoff.steps.reward import NEEDED, is_reward
from service.rollout.child_main import PR_SET_CHILD_SUBREAPER, serve_child
from service.rollout.environment import Task
from service.rollout.user_errors import describe_error
from service.user_code import enter_user_folder, import_user_module

log = logging.getLogger(__name__)

WORK, TEMPORARY, PROMPT, QUESTION = "work", "tmp", "prompt.txt", "question.json"
"""Names in the trajectory's folder: the command's current folder and TMPDIR, its prompt, and the scoring command's
input."""
FILES = "files"
"""Column of a row with the texts of files, by the files' paths in the command's folder."""
REMOVE_SECONDS = 600.0
"""Seconds in which a folder must be removed."""
KEPT_VARIABLES = {"PATH": os.defpath, "LANG": "C.UTF-8"}
"""Environment variables that a command inherits from Baton's process, each with its default."""
PLACEHOLDER = re.compile(r"\{(\w+)\}")
SIGNALLED = range(129, 193)
"""Exit codes that stand for signals: 128 + the signal."""
TIME, SCORE_TIME = "seconds", "score_seconds"
"""Names of the time limits of a command and of its score. A command that is ended at its time limit is still scored."""


class _TooLate(BaseException):
    """Raised in a scoring function at its time limit; not an `Exception`, so that the function's own handlers do not
    catch it."""


class Failed(Exception):
    """The trajectory fails; the message gives the reason."""


class Finished(NamedTuple):
    """Result of one run of the command."""

    reward: float | None
    """The score; None if no score is configured, or the run failed."""
    status: str
    """`ok`; or `failed`, and then the run says nothing about the policy."""
    reason: str
    """The reason why the run failed, or a note that it reached its time limit; otherwise empty."""
    info: Mapping[str, float]
    """Duration of the run in seconds, and size of its output in bytes."""
    transcript: str
    """The command's stdout and stderr, without the key; the middle of a long one is left out."""
    exit_code: int | None = None
    """The command's exit code; None if the command was ended, or did not start."""


class _Trajectory:
    """One trajectory; settings are those of `CommandConfig` as plain values, because many such processes run at
    once."""

    def __init__(self, request: Mapping[str, Any], namespaces: bool) -> None:
        self._settings = request["settings"]
        self._limits: Mapping[str, Any] = self._settings["limits"]
        task = request["task"]
        self._task = Task(**task | {"prompt": tuple(task["prompt"]), "tools": tuple(task["tools"])})
        self._base_url, self._key, self._seed = request["base_url"], request["key"], request["seed"]
        self._namespaces = namespaces
        self.root = Path(request["root"])
        self._folder = self.root / WORK

    async def play(self) -> Finished:
        """Run the command and score its result."""
        transcript, reward, status, code = "", None, "ok", None
        info: Mapping[str, float] = {}
        try:
            self._fill_folder()
            # Keeping the folder open reserves its inode number, so that a replacement is noticed.
            folder, began = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY), monotonic()
            try:
                ended = await self._run_agent()
                code = ended.code
                info = {"seconds": round(monotonic() - began, 3), "output_bytes": len(ended.output)}
                transcript = ended.output.decode(errors="replace").replace(self._key, "[key]")
                reason = _why(ended, self._limits)
                if reason and ended.limit != TIME:
                    raise Failed(reason)
                if not os.path.samestat(os.fstat(folder), self._folder.stat(follow_symlinks=False)):
                    raise Failed("it replaced its folder")
            finally:
                os.close(folder)
            reward = await self._score(transcript)
        except FileNotFoundError:
            status, reason = "failed", "it removed its folder"
        except (Failed, NotStarted) as failed:
            status, reason = "failed", str(failed).replace(self._key, "[key]")
        kept = shortened(transcript, self._limits["transcript_characters"])
        return Finished(reward, status, reason, info, kept, code)

    def _fill_folder(self) -> None:
        """Make the folder with the template's files, the row's files and the prompt."""
        files = self._task.extra_info.get(FILES, {})
        if not isinstance(files, Mapping) or not all(isinstance(text, str) for text in files.values()):
            raise Failed(f"the row's {FILES} are no texts by path")
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
            (self.root / PROMPT).write_text(_prompt(self._task), encoding="utf-8")
        except (OSError, ValueError, RuntimeError, shutil.Error) as error:  # RuntimeError: a link loop
            raise Failed(f"its folder cannot be made: {error!s:.500}") from error

    async def _run_agent(self) -> CommandEnd:
        """Run the command with the address and the key of its session."""
        forwarded = self._namespaces and self._settings["network"] != "open"
        base_url = on_loopback(self._base_url) if forwarded else self._base_url
        values = {
            "prompt": _prompt(self._task),
            "prompt_file": str(self.root / PROMPT),
            "folder": str(self._folder),
            "base_url": base_url,
            "seed": str(self._seed),
        }
        command = [filled(word, values) for word in self._settings["command"]]
        in_command = {"prompt", "prompt_file"} & set(placeholders(self._settings["command"]))
        variables = {
            "BATON_SEED": str(self._seed),
            **{name: filled(text, values) for name, text in self._settings["variables"].items()},
            "OPENAI_BASE_URL": base_url,
            "OPENAI_API_KEY": self._key,
            "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": self._key,
        }
        stdin = Path(os.devnull) if in_command else self.root / PROMPT
        return await self._run(command, stdin, variables, TIME)

    async def _score(self, transcript: str) -> float | None:
        score = self._settings["score"]
        if score is None:
            return None
        if isinstance(score, str):
            return _reward(self._call(score, transcript))
        question = {"task": asdict(self._task), "folder": str(self._folder), "transcript": transcript}
        (self.root / QUESTION).write_text(json.dumps(question), encoding="utf-8")
        ended = await self._run(score, self.root / QUESTION, {}, SCORE_TIME)
        if ended.code != 0 and (ended.code is None or ended.code in SIGNALLED):
            raise Failed(f"its score failed: {_why(ended, self._limits)}")
        return 0.0 if ended.code else _number(ended.output)

    def _call(self, score: str, transcript: str) -> Any:
        module, _, name = score.partition(":")
        try:
            with _ended_after(self._limits[SCORE_TIME]):
                return getattr(import_user_module(module), name)(self._task, self._folder, transcript)
        except _TooLate:
            raise Failed(f"{score} was ended at limits.{SCORE_TIME} ({self._limits[SCORE_TIME]:g})") from None
        except (Exception, SystemExit) as error:  # a user's function may raise anything
            raise Failed(f"{score} raised {describe_error(error)}") from error

    async def _run(self, command: Sequence[str], stdin: Path, variables: Mapping[str, str], time: str) -> CommandEnd:
        kept = {name: os.environ.get(name, default) for name, default in KEPT_VARIABLES.items()}
        own = {"HOME": str(self._folder), "TMPDIR": str(self.root / TEMPORARY)}
        port = None if self._settings["network"] == "open" else port_of(self._base_url)
        launch = Launch(command, self._folder, stdin, {**kept, **own, **variables}, self._limits, port)
        return await run_command(launch, time, self.root, self._base_url, self._namespaces)


@contextmanager
def _ended_after(seconds: float) -> Iterator[None]:
    """Raise `_TooLate` in the block after `seconds`; a block that never returns to Python is ended with its process."""

    def raise_late(*_: Any) -> None:
        raise _TooLate

    before = signal.signal(signal.SIGALRM, raise_late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def filled(text: str, values: Mapping[str, str]) -> str:
    """The text with its placeholders replaced by their values.

    >>> filled("say {prompt} {x}", {"prompt": "{seed}", "seed": "7"})
    'say {seed} {x}'
    """
    return PLACEHOLDER.sub(lambda found: values.get(found[1], found[0]), text)


def placeholders(words: Sequence[str]) -> list[str]:
    """The names of the placeholders in the texts `words`."""
    return [name for word in words for name in PLACEHOLDER.findall(word)]


def shortened(text: str, most: int) -> str:
    """The text; if it has more than `most` characters, only its beginning (a quarter of `most`) and its end (the rest).

    >>> shortened("a beginning, much between, and an end", 16)
    'a be\\n[21 characters left out]\\n, and an end'
    """
    head, left_out = most // 4, len(text) - most
    return f"{text[:head]}\n[{left_out} characters left out]\n{text[head + left_out :]}" if left_out > 0 else text


def remove(folder: Path) -> None:
    """Remove a folder with all its content, however deep, without following links; logs a failure."""
    for command in (["rm", "-rf"], ["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
        if not os.path.lexists(folder):
            return
        subprocess.run([*command, "--", folder], stderr=subprocess.DEVNULL, timeout=REMOVE_SECONDS, check=False)
    if os.path.lexists(folder):
        log.warning("%s could not be removed", folder)


def _prompt(task: Task) -> str:
    return "\n\n".join(message["content"] for message in task.prompt)


def _why(ended: CommandEnd, limits: Mapping[str, Any]) -> str:
    """Why the command failed; empty if it succeeded."""
    if ended.limit:
        return f"it was ended at limits.{ended.limit} ({limits[ended.limit]:g})"
    if ended.code is not None and ended.code in SIGNALLED:
        return f"it was ended by signal {ended.code - 128}"
    return f"its exit code was {ended.code}" if ended.code else ""


def _number(output: bytes) -> float:
    """The number in the last line of a scoring command's output; 1 if that is not a number."""
    lines = output.decode(errors="replace").split("\n")
    last = next((line for line in reversed(lines) if line.strip()), "")
    try:
        return _reward(float(last))
    except ValueError:
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
    refused = namespaces_refused()

    async def answer(request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Play a trajectory; the answer has the fields of `Finished`, and the reason if there are no namespaces."""
        trajectory = _Trajectory(request, namespaces=not refused)
        try:
            return {**(await trajectory.play())._asdict(), "refused": refused}
        finally:
            remove(trajectory.root)

    serve_child(answer)
