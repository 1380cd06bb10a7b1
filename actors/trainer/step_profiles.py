"""Profiles of optimizer steps, which `baton profile` requests from a run in progress."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from actors.trainer.group import TrainerGroup
from service.files import atomic_file
from service.run.profiles import MAX_BYTES, PROFILES, ProfileRequest, ProfileRequests


class Profiles:
    """Begins a requested profile before a step, and writes the profile's files after the last profiled step."""

    def __init__(self, run_folder: Path, ranks: int, trainer: TrainerGroup, say: Callable[[str], None]) -> None:
        self._asked = ProfileRequests(run_folder / PROFILES)
        self._asked.clear()
        self._ranks, self._trainer, self._say = ranks, trainer, say
        self._current: ProfileRequest | None = None
        self._left = 0

    async def before(self) -> None:
        """Begin a requested profile; called before each optimizer step."""
        if self._current is None and (request := self._asked.request(self._ranks)) is not None:
            await self._trainer.begin_profile(request.ranks, request.steps)
            self._current, self._left = request, request.steps

    async def after(self, step: int) -> None:
        """Count an applied optimizer step with this number, and write the files of a finished profile."""
        if self._current is None:
            return
        self._left -= 1
        if self._left == 0:
            request, self._current = self._current, None
            files, problem = list[str](), ""
            for rank, data in zip(request.ranks, await self._trainer.profiles(request.ranks), strict=True):
                name = f"steps-{step - request.steps + 1}-to-{step}-trainer-{rank}.json.gz"
                if len(data) > MAX_BYTES:
                    problem = f"the profile of trainer-{rank} has {len(data) >> 20} MiB; take fewer steps"
                    continue
                with atomic_file(self._asked.folder / name) as partial:
                    partial.write_bytes(data)
                files.append(name)
            self._asked.answer(request, files, problem)
            self._say(f"profile of steps {step - request.steps + 1} to {step}: {problem or ', '.join(files)}")

    def lost(self) -> None:
        """Give up the profile that is being recorded, because the ranks that recorded it have died."""
        if self._current is not None:
            self._asked.answer(self._current, (), "the trainer failed while it was profiled")
            self._current = None
