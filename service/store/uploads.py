"""Uploads a run's checkpoints while training goes on, and at the end its final weights.

    begin step 40     hold_journal     links to the journal, up to the position of the checkpoint
    step 40 durable   checkpoint       links to its files; a thread uploads them, its manifest last
    end of the run    ended, finish    final/ and how the run ended; waits until everything is there

An upload that fails is tried again, with growing pauses, until it succeeds or a newer checkpoint takes its place. One
that fails at the end lets the other go first.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from service.errors import RunFailed, StoreFailed
from service.observe.status import Uploaded
from service.run.folder import EVALUATIONS, FINAL, METRICS, SUMMARY, TRAJECTORIES, UPLOADS
from service.store.contents import RunMark
from service.store.objects import Objects
from service.store.staging import Staged, link_checkpoint, link_journal
from service.store.writing import StoreWriter, TakenOver

REACHED_SECONDS = 30.0
"""Seconds between two notes in the store of how far the run came."""
FIRST_PAUSE = 1.0
MAX_PAUSE = 60.0
"""Shortest and longest pause in seconds before an upload is tried again."""
ENDS = (METRICS, EVALUATIONS, TRAJECTORIES, "learning_curve.png", SUMMARY)
"""Files of the run folder that are uploaded at the end; the summary is the last."""


@dataclass
class _Job:
    """One upload: of a checkpoint, or of how the run ended."""

    what: str
    files: list[Staged]
    step: int | None = None
    """Of a checkpoint."""
    folder: Path | None = None
    """Its links."""
    accepted_tokens: int = 0
    done: set[str] = field(default_factory=set)
    """Paths of files that are in the store."""


class Uploads:
    """A thread with at most one upload under way and one checkpoint waiting; a newer one takes the waiting one's place.

    The methods are called from one thread.
    """

    def __init__(
        self,
        objects: Objects,
        run: Path,
        mark: RunMark,
        keep: int,
        deadline: float,
        say: Callable[[str], None],
    ) -> None:
        """`deadline`: seconds without progress after which the end of the run waits no longer."""
        self.url = objects.url
        self._run, self._say, self._deadline = run, say, deadline
        self._writer = StoreWriter(objects, mark, keep, self._uploaded)
        self._folders = (run / UPLOADS / str(number) for number in count())
        self._held: tuple[Path, list[Staged]] | None = None
        """The journal of the checkpoint that was begun, with the folder of its links."""
        self._changed = threading.Condition()
        self._jobs: list[_Job] = []
        """The first one is under way."""
        self._reached: tuple[int, int] | None = None
        """Step and accepted tokens that are to be noted in the store."""
        self._reached_at = -REACHED_SECONDS
        self._stopped = False
        self._taken_over = ""
        """By whom, in words."""
        self._bug: Exception | None = None
        self._pause = FIRST_PAUSE
        self._left_over = False
        """Whether something that is too old could not be deleted."""
        self._status = Uploaded(self._writer.newest, 0, 0, "")
        self._progress = time.monotonic()
        """When bytes were uploaded last."""
        shutil.rmtree(run / UPLOADS, ignore_errors=True)
        threading.Thread(target=self._work, name="uploads", daemon=True).start()

    # -- what the run calls -------------------------------------------------------------------------------------------

    @property
    def status(self) -> Uploaded:
        """How the uploads stand now."""
        return self._status

    def hold_journal(self, start: int, position: int) -> bool:
        """Keep the journal from `start` to `position` for the checkpoint that begins; False if it has moved on."""
        if self._held is not None:  # of a checkpoint that was given up
            shutil.rmtree(self._held[0], ignore_errors=True)
        folder = next(self._folders)
        held = self._on_disk(folder, lambda: link_journal(self._run, folder, start, position))
        self._held = None if held is None else (folder, held)
        return held is not None

    def checkpoint(self, step: int, accepted_tokens: int) -> None:
        """The checkpoint whose journal was held is durable: upload it in the background."""
        if self._held is None:
            return self._failed("the journal is not in the run folder here, so the checkpoint would be of no use")
        (folder, journal), self._held = self._held, None
        files = self._on_disk(folder, lambda: link_checkpoint(self._run, folder, step))
        if files is not None:
            self._add(_Job(f"the checkpoint of step {step}", [*files, *journal], step, folder, accepted_tokens))

    def ended(self) -> None:
        """The final weights and the summary are written: upload them too."""
        files = [file for file in sorted((self._run / FINAL).rglob("*")) if file.is_file()]
        files += [self._run / name for name in ENDS if (self._run / name).is_file()]
        staged = [Staged(str(file.relative_to(self._run)), file, file.stat().st_size, shared=False) for file in files]
        self._add(_Job("the final weights", staged))

    @property
    def reached_is_due(self) -> bool:
        """Whether the store should be told again how far the run came."""
        return time.monotonic() - self._reached_at >= REACHED_SECONDS

    def reached(self, step: int, accepted_tokens: int) -> None:
        """Note in the store how far the run came."""
        with self._changed:
            self._reached_at = time.monotonic()
            self._reached = step, accepted_tokens
            self._changed.notify_all()

    def left(self) -> str:
        """What is not uploaded yet, in words."""
        with self._changed:
            return ", ".join(_left(job) for job in self._jobs)

    def finish(self) -> None:
        """Wait until everything is uploaded, as long as there is progress.

        Raises:
            RunFailed: something is not uploaded; the message says what and why.
        """
        with self._changed:
            self._progress = time.monotonic()
            while self._jobs and (left := self._progress + self._deadline - time.monotonic()) > 0:
                self._changed.wait(left)
            self._stopped = True
            self._changed.notify_all()
            missing = " and ".join(job.what for job in self._jobs)
        if self._bug is not None:
            raise self._bug
        if self._taken_over:
            raise RunFailed(self._taken_over)
        if missing:
            why = self._status.failing or f"no byte was uploaded for {self._deadline:g} s"
            raise RunFailed(f"{self.url} lacks {missing}, which only {self._run} has now: {why}")
        shutil.rmtree(self._run / UPLOADS, ignore_errors=True)

    def _on_disk(self, folder: Path, link: Callable[[], list[Staged] | None]) -> list[Staged] | None:
        """What `link` returns, which links into a folder; a full or failing disk costs the upload, not the run."""
        try:
            linked = link()
        except OSError as error:
            self._failed(f"{error.filename or folder}: {error.strerror}")
            linked = None
        if linked is None:
            shutil.rmtree(folder, ignore_errors=True)
        return linked

    def _add(self, job: _Job) -> None:
        with self._changed:
            if self._bug is not None:
                raise self._bug
            if not self._taken_over:
                for waiting in [waiting for waiting in self._jobs[1:] if None not in (waiting.step, job.step)]:
                    self._remove(waiting)
                self._jobs.append(job)
            elif job.folder is not None:
                shutil.rmtree(job.folder, ignore_errors=True)
            self._changed.notify_all()

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            while (job := self._next()) is not None:
                is_done = self._upload(job)
                with self._changed:
                    if is_done:
                        self._remove(job)
                    else:
                        self._jobs.append(self._jobs.pop(0))
                    self._changed.notify_all()
        except TakenOver as error:
            self._say(f"{error}; this process uploads no more")
            with self._changed:
                self._taken_over, self._status = str(error), self._status._replace(failing=str(error))
                for job in list(self._jobs):
                    self._remove(job)
                self._changed.notify_all()
        except Exception as error:  # noqa: BLE001 - raised by the next call of the run
            with self._changed:
                self._bug, self._jobs = error, []
                self._changed.notify_all()

    def _next(self) -> _Job | None:
        """Wait for a job; meanwhile note how far the run came. None: there are no more."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._stopped or self._reached is not None)
                reached, self._reached = self._reached, None
                if self._stopped:
                    return None
                job = self._jobs[0] if self._jobs else None
            if reached is not None:
                try:
                    self._writer.note(*reached)
                    self._succeeded()
                except StoreFailed as error:
                    self._failed(str(error))
            if job is not None:
                return job

    def _upload(self, job: _Job) -> bool:
        """Upload until that succeeds, a newer checkpoint waits, or the run ends without it; False: the other job is to
        be tried first."""
        while True:
            try:
                files = self._writer.put(job.files, job.done)
                if job.step is not None:
                    self._writer.complete(job.step, job.accepted_tokens, files)
                    self._status = self._status._replace(step=job.step)
                    self._sweep(job.step)
                self._succeeded()
                return True
            except (StoreFailed, OSError) as error:
                self._failed(f"{job.what} is not uploaded: {error}")
            with self._changed:
                if self._changed.wait_for(lambda: self._stopped or self._is_superseded(job), self._pause):
                    return True
                self._pause = min(2 * self._pause, MAX_PAUSE)
                if len(self._jobs) > 1:
                    return False

    def _sweep(self, step: int) -> None:
        """Delete what is too old, if the store permits that: the checkpoint is there in any case."""
        try:
            self._writer.sweep(step)
        except StoreFailed as error:
            self._status = self._status._replace(failures=self._status.failures + 1)
            if not self._left_over:
                self._say(f"what is too old is not deleted: {error}; uploads go on")
            self._left_over = True

    def _uploaded(self, n_bytes: int) -> None:
        with self._changed:
            self._progress = time.monotonic()
            self._status = self._status._replace(bytes=self._status.bytes + n_bytes)

    def _is_superseded(self, job: _Job) -> bool:
        return job.step is not None and any(other.step is not None for other in self._jobs[1:])

    def _remove(self, job: _Job) -> None:
        if job in self._jobs:
            self._jobs.remove(job)
        if job.folder is not None:
            shutil.rmtree(job.folder, ignore_errors=True)

    def _succeeded(self) -> None:
        self._pause = FIRST_PAUSE
        if self._status.failing:
            self._say(f"{self.url}: uploads succeed again")
        self._status = self._status._replace(failing="")

    def _failed(self, why: str) -> None:
        """Count a failed attempt; the first of several is printed."""
        if not self._status.failing:
            self._say(f"{why}; training goes on, and the upload is tried again")
        self._status = self._status._replace(failures=self._status.failures + 1, failing=why)


def _left(job: _Job) -> str:
    left = [staged.bytes for staged in job.files if staged.path not in job.done]
    return f"{job.what} ({len(left)} of {len(job.files)} files, {sum(left) / 1e6:.0f} MB)"
