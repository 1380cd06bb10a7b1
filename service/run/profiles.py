"""Requests a profile of the next optimizer steps of a run, and answers the request, through files in the run's folder.

baton profile --writes--> profiles/request.json --read by--> driver, before an optimizer step --calls--> ranks
              <--reads--  profiles/answer.json  <--written by-- driver, after the profile files
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from service.errors import RunFailed, UserError
from service.files import create_private, is_locked, write_atomic

PROFILES = "profiles"
REQUEST, ANSWER = "request.json", "answer.json"
POLL_SECONDS = 0.2
MAX_STEPS = 20
"""Maximum number of optimizer steps in a profile."""
MAX_BYTES = 256 << 20
"""Maximum bytes of a profile file; a larger profile is discarded."""


class ProfileRequest(msgspec.Struct, frozen=True):
    """A request to profile a number of optimizer steps on certain ranks."""

    id: str
    steps: int
    ranks: tuple[int, ...]


class ProfileAnswer(msgspec.Struct, frozen=True):
    """The answer to a request: the names of the profile files, or the reason why there are none."""

    id: str
    files: tuple[str, ...]
    problem: str = ""


class ProfileRequests(NamedTuple):
    """The requests in the folder of a run's profiles, as the driver reads and answers them."""

    folder: Path

    def clear(self) -> None:
        """Delete the request, if there is one."""
        (self.folder / REQUEST).unlink(missing_ok=True)

    def request(self, ranks: int) -> ProfileRequest | None:
        """The request that waits for an answer; None if there is none. A request that cannot be met is answered at
        once."""
        try:
            found = msgspec.json.decode((self.folder / REQUEST).read_bytes(), type=ProfileRequest)
        except FileNotFoundError:
            return None
        except msgspec.MsgspecError:
            self.clear()
            return None
        each_once = sorted({*found.ranks} & {*range(ranks)})
        if not 0 < found.steps <= MAX_STEPS or sorted(found.ranks) != each_once:
            problem = f"there are ranks 0 to {ranks - 1}, each once, and at most {MAX_STEPS} steps are profiled"
            self.answer(found, (), problem)
            return None
        return found

    def answer(self, request: ProfileRequest, files: Sequence[str], problem: str = "") -> None:
        """Answer a request with the names of its profile files, or with the problem that prevented them."""
        write_atomic(
            self.folder / ANSWER, msgspec.json.encode(ProfileAnswer(request.id, tuple(files), problem)).decode()
        )
        self.clear()


def ask(folder: Path, steps: int, ranks: Sequence[int], seconds: float, sleep: Callable[[float], None]) -> list[Path]:
    """Request profiles from the run in a folder, and wait up to `seconds` for them. Returns the profile files.

    Raises:
        UserError: no process runs the run, the run cannot record profiles, or another profile is being recorded.
        RunFailed: the run ended meanwhile, or did not write the profiles within `seconds`.
    """
    if not is_locked(folder):
        raise UserError(f"{folder}: this run is not going on")
    request = ProfileRequest(uuid.uuid4().hex, steps, tuple(ranks))
    file = folder / PROFILES / REQUEST
    create_private(file, msgspec.json.encode(request).decode())
    deadline = time.monotonic() + seconds
    try:
        if msgspec.json.decode(file.read_bytes(), type=ProfileRequest) != request:
            raise UserError(f"{folder}: another profile is being recorded; try again when it is written")
        while (found := _answer(folder)) is None or found.id != request.id:
            if not is_locked(folder):
                raise RunFailed(f"{folder}: the run ended before the profile was whole")
            if time.monotonic() > deadline:
                raise RunFailed(f"{folder}: no profile of {steps} optimizer steps within {seconds:.0f} s (--wait)")
            sleep(POLL_SECONDS)
    except FileNotFoundError:
        raise RunFailed(f"{folder}: the request was deleted, as by a run that begins") from None
    if found.problem:
        raise UserError(f"{folder}: {found.problem}")
    return [folder / PROFILES / name for name in found.files]


def _answer(folder: Path) -> ProfileAnswer | None:
    try:
        return msgspec.json.decode((folder / PROFILES / ANSWER).read_bytes(), type=ProfileAnswer)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None
