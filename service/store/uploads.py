"""Uploads a run's checkpoints while training continues, and at the end its final weights.

    step 40 durable   checkpoint       opens its files and the journal; a thread uploads them, the manifest last
    end of the run    ended, finish    final/ and how the run ended; waits until everything is there

An open file stays readable after it is deleted, so an upload may take longer than its checkpoint is kept on the disk.
Requests that fail are repeated for `REPEATED_SECONDS`; then the checkpoint is given up, and the next one is
uploaded.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, NamedTuple

import xxhash

from service.errors import RunFailed, StoreFailed, UserError
from service.observe.status_document import Uploaded
from service.run import folder as names
from service.run.checkpoints import MANIFEST, PREFIX, FileChecksum, Manifest
from service.store.manifest import Damaged, StoredCheckpoint, manifest_name, run_id, stored_steps
from service.store.objects import Objects, open_store

READ_BYTES = 8 << 20
REPEATED_SECONDS = 600.0
"""Seconds for which a request to the object store that fails is repeated."""
WITH_CHECKPOINT = (names.CONFIG, names.METRICS, names.EVALUATIONS, names.DATA, names.MODEL, names.WARM_START)
"""Files and folders of the run that it needs to continue, besides the checkpoint and the journal."""
ENDS = (names.BEST, names.FINAL, names.METRICS, names.EVALUATIONS, names.TRAJECTORIES, names.CURVE, names.SUMMARY)
"""Files and folders that are uploaded at the end of the run; the summary comes last."""


class _Upload(NamedTuple):
    step: int | None
    """None: the end of the run."""
    files: dict[str, tuple[BinaryIO, int]]
    """The open file and the number of bytes to upload, by the path in the run's folder."""
    held: ExitStack

    @property
    def what(self) -> str:
        return "the final weights" if self.step is None else f"the checkpoint of step {self.step}"


def begin_uploads(url: str, run: Path, step: int | None, keep: int, say: Callable[[str], None]) -> Uploads:
    """Check the store at an address. `step`: the checkpoint from which the run continues; None: it is a new run.
    `keep`: number of checkpoints that the store keeps.

    Raises:
        UserError: the store cannot be read, or holds another run, or newer checkpoints of this run.
    """
    objects, why = open_store(url, create=True), ""
    try:
        newest = next(iter(stored_steps(found := objects.sizes())), None)
        if step is None and any(not name.startswith(PREFIX) for name in found):
            why = f"holds other files ({min(found)}, ...)"
        elif newest is not None and StoredCheckpoint.read(objects, newest).run != run_id(run):
            why = "holds another run"
        elif newest is not None and step is not None and newest > step:
            why = f"has step {newest}, and {run} only step {step}"
    except (StoreFailed, Damaged) as error:
        raise UserError(f"run.store: {error}") from None
    if why:
        raise UserError(f"run.store: {url} {why}; give another place, or go on with that run: baton run --resume {url}")
    return Uploads(open_store(url, within=REPEATED_SECONDS), run, newest, keep, say)


class Uploads:
    """Uploads checkpoints and final weights in a thread. One upload is in progress at a time, and one checkpoint may
    wait; a newer checkpoint replaces the waiting one.

    All methods must be called from the same thread. `checkpoint` and `finish` raise `RunFailed` if another process has
    written checkpoints of the run to the store.
    """

    def __init__(self, objects: Objects, run: Path, newest: int | None, keep: int, say: Callable[[str], None]) -> None:
        """`newest`: the newest checkpoint in the store. `keep`: number of checkpoints that the store keeps."""
        self.url = objects.url
        self._objects, self._run, self._keep, self._say = objects, run, keep, say
        self._id, self._writer = run_id(run), uuid.uuid4().hex
        self._jobs: list[_Upload] = []
        """Uploads that have not ended; the first one is in progress."""
        self._lock = threading.Lock()
        """Guards `_jobs`."""
        self._thread = threading.Thread()
        self._broken: Exception | None = None
        """Why nothing is uploaded any more."""
        self._lacks: list[str] = []
        """What was given up at the end."""
        self.status = Uploaded(newest, 0, 0, "")
        """The state of the uploads."""

    def checkpoint(self, step: int, start: int, end: int) -> bool:
        """Upload a durable checkpoint in the background, with the journal from position `start` to `end`. Returns False
        if files are not there: they were removed meanwhile, or the journal is on another machine."""
        folder = self._run / names.CHECKPOINTS / f"{PREFIX}{step}"
        try:
            segments = {int(path.stem): path for path in (self._run / names.JOURNAL).glob("*.journal")}
            starts = sorted(at for at in segments if start <= at < end)
            if starts[:1] != [start]:
                raise FileNotFoundError(0, "a part of the journal is not there", str(self._run / names.JOURNAL))
            files = {segments[at]: until - at for at, until in zip(starts, [*starts[1:], end], strict=True)}
            own = Manifest.model_validate_json((folder / MANIFEST).read_bytes()).files
            files |= {folder / name: file.bytes for name, file in own.items()}
            files |= self._sizes((*WITH_CHECKPOINT, str((folder / MANIFEST).relative_to(self._run))))
            self._add(step, files)
        except OSError as error:
            self._failed(f"the checkpoint of step {step} is not uploaded: {error.filename}: {error.strerror}")
            return False
        return True

    def ended(self) -> None:
        """Upload the final and the best weights, and the files that say how the run ended (`ENDS`). To be called when
        all of them are written."""
        self._add(None, self._sizes(ENDS))

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
        if self._broken is not None:
            raise self._broken
        if self._lacks:
            lacks, why = " and ".join(self._lacks), self.status.failing
            raise RunFailed(f"{self.url} lacks {lacks}, which only {self._run} has now: {why}")

    def _sizes(self, wanted: tuple[str, ...]) -> dict[Path, int]:
        found = [file for name in wanted for file in (self._run / name, *sorted((self._run / name).rglob("*")))]
        return {file: file.stat().st_size for file in found if file.is_file()}

    def _add(self, step: int | None, sizes: Mapping[Path, int]) -> None:
        """Open files, and queue the upload of so many bytes from the beginning of each."""
        if self._broken is not None:
            raise self._broken
        with ExitStack() as held:
            files = dict[str, tuple[BinaryIO, int]]()
            for file, size in sizes.items():
                files[str(file.relative_to(self._run))] = held.enter_context(file.open("rb")), size
            job = _Upload(step, files, held.pop_all())
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
        while self._jobs and self._broken is None:
            job = self._jobs[0]
            try:
                self._upload(job)
                if job.step is not None:  # a newer checkpoint stands in for those that were given up
                    self._lacks.clear()
                    self.status = self.status._replace(failing="", step=job.step)
            except (StoreFailed, Damaged, OSError) as error:
                self._lacks.append(job.what)
                self._failed(f"{job.what} is not uploaded: {error}")
            except Exception as error:  # noqa: BLE001 - raised by the next call of the run
                self._broken, self.status = error, self.status._replace(failing=str(error))
            with self._lock:
                self._end(job)

    def _upload(self, job: _Upload) -> None:
        step, files = job.step, dict[str, FileChecksum]()
        manifest = StoredCheckpoint(run=self._id, writer=self._writer, step=step or 0, files={})
        if step is not None:
            self._check_sole(step)
        for path, (opened, size) in job.files.items():
            hasher = xxhash.xxh3_64()
            self._objects.put(path if step is None else manifest.object_of(path), _chunks(opened, size, hasher), size)
            files[path] = FileChecksum(bytes=size, xxh3_64=hasher.hexdigest())
            self.status = self.status._replace(bytes=self.status.bytes + size)
        if step is None:
            return
        data = manifest.model_copy(update={"files": files}).model_dump_json(indent=1).encode()
        while not self._objects.create(manifest_name(step), data):
            self._check_sole(step)
            self._objects.delete([manifest_name(step)])  # of a checkpoint that the run has undone since
        found = self._objects.sizes()
        kept = {f"{PREFIX}{one}" for one in [one for one in stored_steps(found) if one <= step][: self._keep]}
        old = [name for name in found if name.startswith(PREFIX) and name.partition("/")[0] not in kept]
        try:
            self._objects.delete(sorted(old, key=lambda name: name.count("/")))  # each manifest first
        except StoreFailed as error:
            self._say(f"what is too old is not deleted: {error}; uploads go on")

    def _check_sole(self, step: int) -> None:
        """Check that no other process has written a checkpoint of this step or a later one."""
        for found in stored_steps(self._objects.sizes()):
            if found >= step and StoredCheckpoint.read(self._objects, found).writer != self._writer:
                raise RunFailed(f"{self.url} has the checkpoint of step {found} from another process of this run")

    def _failed(self, why: str) -> None:
        self._say(f"{why}; training goes on, and the next checkpoint is uploaded again")
        self.status = self.status._replace(failures=self.status.failures + 1, failing=why)


def _chunks(opened: BinaryIO, left: int, hasher: xxhash.xxh3_64) -> Iterator[bytes]:
    while left > 0 and (chunk := opened.read(min(READ_BYTES, left))):
        hasher.update(chunk)
        yield chunk
        left -= len(chunk)
