"""A run whose generator and trainer follow a script: its weights are a function of which groups it trained, in order.

Its buffer, journal, checkpoints and uploads are the real ones, and rewards depend on the weights: whoever trains the
same groups in the same order comes to the same weights, bit by bit.
"""

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from service.config import Config, resolved_yaml
from service.handoff.verbs import Assignment, Wait
from service.run.checkpoints import TRAINER, Checkpoints, Manifest
from service.run.folder import CHECKPOINTS, CONFIG, FINAL, JOURNAL, METRICS, SUMMARY
from service.run.records.writer import RunWriter
from service.store import uploads as uploading
from service.store.objects import Objects
from service.store.uploads import Uploads
from service.types import MiniBatch, PolicyVersion
from tests.invariant import violations
from tests.pure.buffer.world import Generator, World, config
from tests.waiting import until

WEIGHTS = "rank_0_of_1.safetensors"
EVERY = 2
STEPS = 7
SEGMENT_BYTES = 1 << 12
"""So short that a checkpoint's journal has several segments, and the first ones go while the run goes on."""


def settings(runs: Path, **run: object) -> Config:
    return config(
        run={"dir": str(runs), "name": "scripted", "store": "s3://bucket/run", **run},
        trainer={"checkpoint_every": EVERY, "keep_checkpoints": 2},
        buffer={"lookahead": 0, "max_staleness": 0},
        model={"path": "policy"},
        data={"train": "rows.jsonl"},
    )


def begun_uploads(
    objects: Objects, of: Config, folder: Path, step: int | None, say: Callable[[str], None] = print
) -> Uploads:
    """The uploads of a run to a store, which is opened already."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(uploading, "Objects", lambda *how: objects)
        return Uploads(objects.url, folder, step, of.trainer.keep_checkpoints, say)


class ScriptedRun:
    """A run in its folder; `resume_from` is the checkpoint from which it goes on."""

    def __init__(self, folder: Path, of: Config, objects: Objects | None, resume_from: Manifest | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.said = folder, list[str]()
        self.settles: Callable[[], None] = self._until_uploaded
        """Called after every checkpoint."""
        self.writer = RunWriter(folder)
        (folder / CONFIG).write_text(resolved_yaml(of))
        self.uploading: Uploads | None = None
        if objects is not None:
            step = None if resume_from is None else resume_from.step
            self.uploading = begun_uploads(objects, of, folder, step, self.said.append)
        self.checkpoints = Checkpoints(folder / CHECKPOINTS, of.trainer.keep_checkpoints)
        self.world = World(folder / JOURNAL, of, segment_bytes=SEGMENT_BYTES)
        self.step, self.weight, self.ahead = 0, 1.0, list[Assignment]()
        if resume_from is None:
            self._checkpoint()
            return
        resume_from.check_journal(self.world.journal.synced, folder / JOURNAL)
        self.world.buffer.resume()
        self.world.generator = Generator(self.world.buffer)
        self.step = resume_from.step
        (self.weight,) = struct.unpack("<d", (self.checkpoints.path(self.step) / TRAINER / WEIGHTS).read_bytes())
        self.world.trainer_incarnation = self.world.buffer.join("trainer", "trainer", self.step)
        self.writer.cut_after(self.step)

    @property
    def uploads(self) -> Uploads:
        assert self.uploading is not None
        return self.uploading

    @property
    def version(self) -> PolicyVersion:
        return PolicyVersion(self.world.trainer_incarnation, self.step)

    def train(self, steps: int = STEPS) -> None:
        """Take steps, and write a checkpoint after every second one."""
        while self.step < steps:
            batch = self._batch()
            self.weight += 0.1 * self.weight * float(batch.return_G.sum()) + sum(batch.groups) / 1000
            lease, now = batch.lease, PolicyVersion(self.world.trainer_incarnation, self.step + 1)
            assert self.world.buffer.commit(self.world.trainer_incarnation, lease, now) is None
            self.step = now.step
            self.writer.log_step({"trainer/global_step": self.step, "weight": self.weight, "groups": sum(batch.groups)})
            if self.step % EVERY == 0:
                self._checkpoint()
            assert violations(self.world.buffer.ledger) == []
        self.writer.close()

    def end(self) -> None:
        """Write the final weights and the summary, and wait for the uploads."""
        (self.folder / FINAL).mkdir()
        (self.folder / FINAL / "model.safetensors").write_bytes(struct.pack("<d", self.weight))
        (self.folder / SUMMARY).write_text(json.dumps({"weight": self.weight}))
        if self.uploading is not None:
            self.uploads.ended()
            self.uploads.finish()

    def history(self) -> list[str]:
        """The lines of the metrics: every weight and every group, as they were."""
        return (self.folder / METRICS).read_text().splitlines()

    def _batch(self) -> MiniBatch:
        """The next mini-batch; its groups are sampled as far as they are not there yet."""
        buffer, incarnation = self.world.buffer, self.world.trainer_incarnation
        while isinstance(answer := buffer.lease(incarnation), Wait):
            work = self.ahead.pop() if self.ahead else self.world.generator.claimed(self.version)
            first = self.weight * (work.group_id + 1)
            self.world.generator.finish(work, self.version, rewards=[first % 1.0, (3 * first) % 1.0])
        assert isinstance(answer, MiniBatch), answer
        return answer

    def _checkpoint(self) -> None:
        self.world.journal.sync()
        status = self.world.buffer.status()
        folder = self.checkpoints.begin(self.step) / TRAINER
        folder.mkdir()
        work = self.world.generator.claim(self.version)  # goes on while the checkpoint is written
        self.ahead += [work] if isinstance(work, Assignment) else []
        (folder / WEIGHTS).write_bytes(struct.pack("<d", self.weight))
        oldest = self.checkpoints.finish(self.step, status.journal_synced)
        self.world.buffer.covered(self.step, oldest)
        if self.uploading is not None:
            self.world.journal.sync()
            status = self.world.buffer.status()
            assert self.uploads.checkpoint(self.step, status.journal_start, status.journal_synced)
            self.settles()

    def _until_uploaded(self) -> None:
        until(lambda: not self.uploads.left())
