"""The buffer with a scripted generator and trainer: `python -m service.handoff` prints the ledger after every verb."""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from service.clock import SystemClock
from service.handoff.attempts import AttemptSettings
from service.handoff.batches.batch import BatchSettings
from service.handoff.batches.credit import Rule
from service.handoff.batches.filters import FilterSettings
from service.handoff.buffer import Buffer
from service.handoff.buffer_settings import BufferSettings
from service.handoff.group_bytes import WorstBytes
from service.handoff.journal.journal import Journal
from service.handoff.steps.tables import step_group
from service.handoff.steps.values import Limits
from service.handoff.steps.wire import encode
from service.handoff.verbs import Assignment, Claim
from service.types import MiniBatch, PolicyVersion, Sender, Step, TrajectoryEnd

SETTINGS = BufferSettings(
    limits=Limits(100, 64, 16, max_turns=1, n_samples_per_prompt=2, max_attempts=3, max_group_bytes=1 << 20),
    worst=WorstBytes(n_samples=2, max_group_bytes=1 << 20, tokens_of_step=80, max_turns=1),
    batches=BatchSettings(ranks=1, token_budget=256),
    filters=FilterSettings(Rule("grpo")),
    attempts=AttemptSettings(),
    mini_batch_size=1,
)


def main(folder: Path) -> None:
    """Run one prompt through all verbs: a group of two trajectories, a mini-batch that is released and leased again,
    and the commit of version 1:1 (incarnation:step)."""
    buffer = Buffer(SETTINGS, ["what is 1 + 1?"], Journal(folder, SystemClock()), SystemClock())

    def show(verb: str) -> None:
        ledger = buffer.ledger
        groups = {group_id: str(group.state) for group_id, group in ledger.state.groups.items()}
        tokens = {str(fate): count for fate, count in ledger.state.fates.items() if count}
        print(f"{verb:<8} groups {groups}, tokens {tokens}")

    trainer, generator = buffer.join("trainer", "trainer"), buffer.join("generator", "g1")
    work = buffer.claim(Claim("g1", generator, buffer.version))
    if not isinstance(work, Assignment):
        raise TypeError(f"no work: {work}")
    show("claim")
    for number, (of, _) in enumerate(work.trajectories()):
        prompt, response = np.array([1, 2, 3], np.int32), np.array([4, 5], np.int32)
        versions, logprobs = np.full(2, buffer.version.pack()), np.full(2, -0.5, np.float32)
        step = Step(of, work.prompt_uid, 0, prompt, response, logprobs, np.ones(2, np.bool_), versions)
        end = TrajectoryEnd(of, work.prompt_uid, n_steps=1, stop_reason="stop", reward=float(number))
        buffer.submit(encode(step_group(Sender("g1", generator, number), [step], [end])))
        show("submit")

    def lease() -> MiniBatch:
        answer = buffer.lease(trainer)
        if not isinstance(answer, MiniBatch):
            raise TypeError(f"no mini-batch: {answer}")
        show("lease")
        return answer

    buffer.release(trainer, lease().lease, "the optimizer step failed")
    show("release")
    batch = lease()
    buffer.commit(trainer, batch.lease, PolicyVersion(trainer, 1))
    show("commit")
    buffer.covered(1)
    show("covered")
    print(f"advantages {[round(advantage, 3) for advantage in batch.advantage_G.tolist()]}, events {buffer.revision}")


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        main(Path(folder))
