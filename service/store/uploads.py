"""Uploads a run's checkpoints while training continues, and at the end its final weights.

    step 40 durable   checkpoint       opens its files and the journal; a thread uploads them, the manifest last
    end of the run    ended, finish    final/ and how the run ended; waits until everything is there

An open file stays readable after it is deleted, so an upload may take longer than its checkpoint is kept on the disk.
Requests that fail are repeated for `REPEATED_SECONDS`; then the checkpoint is given up, and the next one is uploaded.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, NamedTuple

from service.errors import RunFailed, StoreFailed, UserError
from service.observe.status_document import Uploaded
from service.run import folder as names
from service.run.checkpoints import MANIFEST, PREFIX
from service.store.objects import Objects, StoredManifest, manifest_name, run_id, stored_steps

REPEATED_SECONDS = 600.0
"""Seconds for which a request to the object store that fails is repeated."""
WITH_CHECKPOINT = (names.CONFIG, names.METRICS, names.EVALUATIONS, names.DATA, names.MODEL, names.WARM_START)
"""Files and folders of the run that it needs to continue, besides the checkpoint and the journal."""
ENDS = (names.BEST, names.FINAL, names.METRICS, names.EVALUATIONS, names.TRAJECTORIES, names.CURVE, names.SUMMARY)
"""Files and folders that are uploaded at the end of the run; the summary comes last."""


class _Upload(NamedTuple):
    step: int | None
    """None: the end of the run."""
    files: Mapping[str, BinaryIO]
    """The open files, by their paths in the run's folder."""
    held: ExitStack
    what: str
    """What is uploaded, in words."""


class Uploads:
    """Uploads checkpoints and final weights in a thread. One upload is in progress at a time, and one checkpoint may
    wait; a newer checkpoint replaces the waiting one.

    All methods must be called from the same thread.
    """

    def __init__(self, url: str, run: Path, step: int | None, keep: int, say: Callable[[str], None]) -> None:
        """Check the store at an address. `step`: the checkpoint from which the run continues; None: it is a new run.
        `keep`: number of checkpoints that the store keeps.

        Raises:
            UserError: the store cannot be read, or holds another run, or newer checkpoints of this run.
        """
        self.url, self._run, self._keep, self._say = url, run, keep, say
        self._id, why = run_id(run), ""
        try:
            self._objects = Objects(url, REPEATED_SECONDS)
            newest = next(iter(stored_steps(found := Objects(url).names())), None)
            if step is None and any(not name.startswith(PREFIX) for name in found):
                why = f"holds other files ({min(found)}, ...)"
            elif newest is not None and StoredManifest.read(self._objects, newest).run != self._id:
                why = "holds another run"
            elif newest is not None and step is not None and newest > step:
                why = f"has step {newest}, and {run} only step {step}"
        except StoreFailed as error:
            raise UserError(f"run.store: {error}") from None
        if why:
            instead = f"give another place, or go on with that run: baton run --resume {url}"
            raise UserError(f"run.store: {url} {why}; {instead}")
        self._written = set[int]()
        """Steps of the checkpoints that this process has uploaded."""
        self._other = ""
        """Text that another process writes to the store, so that nothing more is uploaded; empty if there is none."""
        self._jobs: list[_Upload] = []
        """Uploads that have not ended; the first one is in progress."""
        self._lock = threading.Lock()
        """Guards `_jobs`."""
        self._thread = threading.Thread()
        self.status = Uploaded(newest, 0, 0, "")
        """The state of the uploads."""

    def checkpoint(self, step: int, start: int, end: int) -> bool:
        """Upload a durable checkpoint in the background, with the journal from position `start` to `end`. Returns False
        if files are not there: they were removed meanwhile, or the journal is on another machine."""
        try:
            segments = {int(path.stem): path for path in (self._run / names.JOURNAL).glob("*.journal")}
            starts = sorted(at for at in segments if start <= at < end)
            if starts[:1] != [start]:
                raise FileNotFoundError(0, "a part of the journal is not there", str(self._run / names.JOURNAL))
            folder = f"{names.CHECKPOINTS}/{PREFIX}{step}"
            manifest = self._run / folder / MANIFEST  # deleted first when the checkpoint is deleted
            self._add(step, [*(segments[at] for at in starts), *self._files(*WITH_CHECKPOINT, folder), manifest])
        except OSError as error:
            self._failed(f"not uploaded: the checkpoint of step {step}: {error.filename}: {error.strerror}")
            return False
        return True

    def ended(self) -> None:
        """Upload the final and the best weights, and the files that say how the run ended (`ENDS`). To be called when
        all of them are written."""
        self._add(None, self._files(*ENDS))

    def left(self) -> str:
        """A text that lists what is not uploaded yet."""
        return " and ".join(job.what for job in self._jobs)

    def finish(self) -> None:
        """Wait until every upload has ended.

        Raises:
            RunFailed: something is not uploaded; the message names it and the reason.
        """
        if self._thread.ident is not None:
            self._thread.join()
        if why := self.status.failing or self.left():  # something is left if the thread died of a bug
            raise RunFailed(f"{self.url} lacks files that only {self._run} has now: {why}")

    def _files(self, *wanted: str) -> list[Path]:
        found = [file for name in wanted for file in (self._run / name, *sorted((self._run / name).rglob("*")))]
        return [file for file in found if file.is_file()]

    def _add(self, step: int | None, files: Sequence[Path]) -> None:
        """Open files, and queue their upload."""
        with ExitStack() as held:
            opened = {str(file.relative_to(self._run)): held.enter_context(file.open("rb")) for file in files}
            what = "the final weights" if step is None else f"the checkpoint of step {step}"
            job = _Upload(step, opened, held.pop_all(), what)
        with self._lock:
            for waiting in self._jobs[1:]:
                if step is not None and waiting.step is not None:
                    self._end(waiting)
            self._jobs.append(job)
            if len(self._jobs) == 1:
                self._thread = threading.Thread(target=self._work, name="uploads", daemon=True)
                self._thread.start()

    def _end(self, job: _Upload) -> None:
        self._jobs.remove(job)
        job.held.close()

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        """Upload until nothing waits."""
        job: _Upload | None = self._jobs[0]
        while job is not None:
            try:
                self._upload(job)
            except (StoreFailed, OSError) as error:
                self._failed(f"not uploaded: {job.what}: {error}")
            with self._lock:
                self._end(job)
                job = next(iter(self._jobs), None)

    def _upload(self, job: _Upload) -> None:
        if self._other:
            raise StoreFailed(self._other)
        manifest, step = StoredManifest(run=self._id, upload=uuid.uuid4().hex), job.step
        prefix = "" if step is None else f"{PREFIX}{step}/{manifest.upload}/"
        for path, file in job.files.items():
            self.status = self.status._replace(bytes=self.status.bytes + self._objects.put(prefix + path, file))
        if step is None:
            return
        if not self._objects.create(manifest_name(step), manifest.model_dump_json().encode()):
            if step not in self._written:
                self._other = f"{self.url} has the checkpoint of step {step} from another process of this run"
            raise StoreFailed(self._other or f"{self.url} has this checkpoint from before the run went back")
        self._written.add(step)
        self.status = self.status._replace(failing="", step=step)  # newer than failed uploads
        try:
            found = self._objects.names()
            kept = {f"{PREFIX}{one}" for one in (step, *stored_steps(found)[: self._keep])}
            old = [name for name in found if name.startswith(PREFIX) and name.partition("/")[0] not in kept]
            self._objects.delete(sorted(old, key=lambda name: name.count("/")))  # each manifest first
        except StoreFailed as error:
            self._say(f"the old checkpoints in the store are not deleted: {error}; uploads go on")

    def _failed(self, why: str) -> None:
        self._say(f"{why}; training goes on")
        self.status = self.status._replace(failures=self.status.failures + 1, failing=why)
