"""Uploads a run's checkpoints while training continues, and at the end its final weights.

    begin step 40     hold_journal     links to the journal, up to the position of the checkpoint
    step 40 durable   checkpoint       links to its files; a thread uploads them, its manifest last
    end of the run    ended, finish    final/ and how the run ended; waits until everything is there

An upload that fails is tried again, with backoff, until it succeeds or a newer checkpoint takes its place.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from queue import SimpleQueue

from service.backoff import Backoff
from service.errors import RunFailed, StoreFailed, UserError
from service.observe.status import Uploaded
from service.run.folder import BEST, EVALUATIONS, FINAL, METRICS, SUMMARY, TRAJECTORIES, UPLOADS
from service.store.contents import RunMark, claimed
from service.store.objects import Objects
from service.store.staging import Staged, as_it_is, link_checkpoint, link_journal
from service.store.writing import StoreWriter, TakenOver

REACHED_SECONDS = 30.0
"""Minimum seconds between two writes of the newest step to the store."""
POLL_SECONDS = 0.02
BACKOFF = Backoff(1.0, 60.0)
"""Pauses after failed attempts; an attempt that stored at least one file counts as progress."""
ENDS = (METRICS, EVALUATIONS, TRAJECTORIES, "learning_curve.png", SUMMARY)
"""Files of the run's folder that are uploaded at the end of the run; the summary comes last."""


@dataclass(eq=False)
class _Job:
    """One upload: of a checkpoint, of the run's results, or (without files) of its progress."""

    what: str
    files: list[Staged]
    step: int | None = None
    """The checkpoint's step; None if the upload is not of a checkpoint."""
    folder: Path | None = None
    """The folder with the links to the upload's files."""
    accepted_tokens: int = 0
    done: set[str] = field(default_factory=set)
    """Paths of files that are in the store."""

    def left(self) -> str:
        """Description of what is not uploaded yet."""
        left = [staged.size for staged in self.files if staged.path not in self.done]
        return f"{self.what} ({len(left)} of {len(self.files)} files, {sum(left) / 1e6:.0f} MB)"


def claim_store(objects: Objects, run: Path, keep: int, deadline: float, say: Callable[[str], None]) -> Uploads:
    """Claim a store for the run in the folder `run`, and start the thread that uploads. The other arguments are
    described at `Uploads`.

    Raises:
        UserError: the store cannot be used, or belongs to another run, or another process continued this run from it.
    """
    try:
        return Uploads(objects, run, claimed(objects, run), keep, deadline, say)
    except StoreFailed as error:
        raise UserError(f"run.store: {error}") from None


class Uploads:
    """Uploads checkpoints and final weights in a thread. One upload is in progress at a time, and one checkpoint may
    wait; a newer checkpoint replaces the waiting one.

    All methods must be called from the same thread.
    """

    def __init__(
        self, objects: Objects, run: Path, mark: RunMark, keep: int, deadline: float, say: Callable[[str], None]
    ) -> None:
        """`keep`: number of checkpoints that the store keeps. `deadline`: seconds without an uploaded byte after which
        `finish` stops waiting."""
        self.url = objects.url
        self._run, self._say, self._deadline = run, say, deadline
        self._writer = StoreWriter(objects, mark, keep, self._uploaded)
        self._folders = (run / UPLOADS / str(number) for number in count())
        self._held: tuple[Path, list[Staged]] | None = None
        """The folder with the journal's links, and its files, for the checkpoint that was begun."""
        self._jobs: list[_Job] = []
        """Uploads that have not ended, oldest first."""
        self._under_way: _Job | None = None
        self._lock = threading.Lock()
        """Guards `_jobs` and `_under_way`."""
        self._queue = SimpleQueue[_Job]()
        self._came = threading.Event()
        """Set to end a pause: another upload was added, or the run no longer waits."""
        self._is_over = False
        self._broken: Exception | None = None
        """Why nothing is uploaded any more: `TakenOver`, or a bug."""
        self._reached_at = -REACHED_SECONDS
        self._keeps_old = False
        """Whether a deletion of old checkpoints has failed."""
        self.status = Uploaded(self._writer.newest, 0, 0, "")
        """The state of the uploads."""
        self._progress = time.monotonic()
        """Time at which bytes were last uploaded."""
        shutil.rmtree(run / UPLOADS, ignore_errors=True)
        threading.Thread(target=self._work, name="uploads", daemon=True).start()

    # -- what the run calls -------------------------------------------------------------------------------------------

    def hold_journal(self, start: int, position: int) -> bool:
        """Keep the journal from `start` to `position`, through links, for the checkpoint that begins now. Returns False
        if this failed, for example because segments were removed."""
        if self._held is not None:  # links of an abandoned checkpoint
            shutil.rmtree(self._held[0], ignore_errors=True)
        folder = next(self._folders)
        held = self._linked(folder, lambda: link_journal(self._run, folder, start, position))
        self._held = None if held is None else (folder, held)
        return held is not None

    def checkpoint(self, step: int, accepted_tokens: int) -> None:
        """Upload a durable checkpoint in the background, with the journal that the last call of `hold_journal` kept."""
        if self._held is None:
            return self._failed("the journal is not in the run folder here, so the checkpoint would be of no use")
        (folder, journal), self._held = self._held, None
        files = self._linked(folder, lambda: link_checkpoint(self._run, folder, step))
        if files is not None:
            self._add(_Job(f"the checkpoint of step {step}", [*files, *journal], step, folder, accepted_tokens))

    def ended(self) -> None:
        """Upload the final and the best weights, and the files that say how the run ended (`ENDS`). To be called when
        all of them are written."""
        weights = [file for name in (BEST, FINAL) for file in sorted((self._run / name).rglob("*"))]
        files = [*weights, *(self._run / name for name in ENDS)]
        staged = [as_it_is(self._run, file, shared=False) for file in files if file.is_file()]
        self._add(_Job("the final weights", staged))

    @property
    def reached_is_due(self) -> bool:
        """True if the newest step should be written to the store again, because enough time has passed."""
        return time.monotonic() - self._reached_at >= REACHED_SECONDS

    def reached(self, step: int, accepted_tokens: int) -> None:
        """Write the newest step and the number of accepted tokens to the store, in the background."""
        self._reached_at = time.monotonic()
        self._queue.put(_Job("", [], step, accepted_tokens=accepted_tokens))

    def left(self) -> str:
        """A text that lists what is not uploaded yet."""
        return ", ".join(job.left() for job in self._jobs)

    def finish(self) -> None:
        """Wait until everything is uploaded; stop waiting if no byte is uploaded for the deadline.

        Raises:
            RunFailed: something is not uploaded; the message names it and the reason.
        """
        self._progress = time.monotonic()
        while self._jobs and time.monotonic() - self._progress < self._deadline:
            time.sleep(POLL_SECONDS)
        self._is_over = True
        self._came.set()
        self._queue.put(_Job("", []))
        missing = " and ".join(job.what for job in self._jobs)
        if isinstance(self._broken, TakenOver):
            raise RunFailed(str(self._broken))
        if self._broken is not None:
            raise self._broken
        if missing:
            why = self.status.failing or f"no byte was uploaded for {self._deadline:g} s"
            raise RunFailed(f"{self.url} lacks {missing}, which only {self._run} has now: {why}")
        shutil.rmtree(self._run / UPLOADS, ignore_errors=True)

    def _linked(self, folder: Path, link: Callable[[], list[Staged] | None]) -> list[Staged] | None:
        """The result of `link`, which links files into a folder; if the disk fails, the upload is lost but the run
        continues."""
        try:
            linked = link()
        except OSError as error:
            self._failed(f"{error.filename or folder}: {error.strerror}")
            linked = None
        if linked is None:
            shutil.rmtree(folder, ignore_errors=True)
        return linked

    def _add(self, job: _Job) -> None:
        if self._broken is not None and not isinstance(self._broken, TakenOver):
            raise self._broken
        with self._lock:
            self._jobs.append(job)
            for waiting in [one for one in self._jobs if one is not self._under_way and self._is_old(one)]:
                self._end(waiting)
        self._queue.put(job)
        self._came.set()

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        failures = 0
        while True:
            job = self._queue.get()
            if self._is_over:
                return
            with self._lock:
                if job.files and job not in self._jobs:
                    continue
                self._under_way = job
            stored = len(job.done)
            try:
                succeeded = self._broken is not None or self._succeeds(job)
                if job.files:  # a note of progress says nothing about a checkpoint that waits
                    failures = 0 if succeeded else 1 if len(job.done) > stored else failures + 1
            except TakenOver as error:
                self._say(f"{error}; this process uploads no more")
                self._broken, self.status = error, self.status._replace(failing=str(error))
            except Exception as error:  # noqa: BLE001 - raised by the next call of the run
                self._broken = error
            with self._lock:
                self._under_way = None
                if not failures or self._broken is not None or not job.files or self._is_old(job):
                    self._end(job)
                    continue
            self._came.wait(BACKOFF.pause(failures))
            self._came.clear()
            self._queue.put(job)

    def _succeeds(self, job: _Job) -> bool:
        try:
            self._upload(job)
        except (StoreFailed, OSError) as error:
            self._failed(f"{job.what} is not uploaded: {error}" if job.what else str(error))
            return False
        if job.files or not self._jobs:
            if self.status.failing:
                self._say(f"{self.url}: uploads succeed again")
            self.status = self.status._replace(failing="")
        return True

    def _upload(self, job: _Job) -> None:
        if job.step is not None and not job.files:
            return self._writer.note(job.step, job.accepted_tokens)
        files = self._writer.put(job.files, job.done)
        if job.step is not None:
            self._writer.complete(job.step, job.accepted_tokens, files)
            self.status = self.status._replace(step=job.step)
            self._sweep(job.step)

    def _sweep(self, step: int) -> None:
        """Delete old checkpoints, if the store permits that: the new checkpoint is complete in any case."""
        try:
            self._writer.sweep(step)
        except StoreFailed as error:
            self.status = self.status._replace(failures=self.status.failures + 1)
            if not self._keeps_old:
                self._say(f"what is too old is not deleted: {error}; uploads go on")
            self._keeps_old = True

    def _uploaded(self, n_bytes: int) -> None:
        self._progress = time.monotonic()
        self.status = self.status._replace(bytes=self.status.bytes + n_bytes)

    def _is_old(self, job: _Job) -> bool:
        """Whether a newer checkpoint waits."""
        steps = [other.step for other in self._jobs if other.step is not None]
        return job.step is not None and bool(steps) and job.step != steps[-1]

    def _end(self, job: _Job) -> None:
        """End an upload that is complete or no longer needed; deletes its links."""
        if job in self._jobs:
            self._jobs.remove(job)
        if job.folder is not None:
            shutil.rmtree(job.folder, ignore_errors=True)

    def _failed(self, why: str) -> None:
        """Count a failed attempt; prints only the first of several."""
        if not self.status.failing:
            self._say(f"{why}; training goes on, and the upload is tried again")
        self.status = self.status._replace(failures=self.status.failures + 1, failing=why)
