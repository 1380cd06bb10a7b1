"""A state machine over buffer and journal: whatever happens in whatever order, the promises hold."""

import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from service.handoff.steps.values import Role, packed_roles
from service.handoff.steps.wire import accepted_group
from service.handoff.verbs import Assignment, Receipt, Wait, WaitReason
from service.types import MiniBatch, PolicyVersion, Refusal, RefusalReason, Step, TrajectoryEnd, TrajectoryId
from tests.invariant import fingerprint, violations
from tests.pure.buffer.world import Generator, World, config, step

NAMES = ("g1", "g2", "g3")
LOOKAHEAD = 2
MAX_STALENESS = 2


class BufferMachine(RuleBasedStateMachine):
    """Generators claim, stream, die and come back; messages are late or doubled; trainers lease, commit, go back."""

    @initialize(
        order=st.sampled_from(["finished_first", "strict"]),
        filters=st.booleans(),
        segment_bytes=st.sampled_from([1, 5_000, 1 << 20]),
    )
    def begin(self, order: str, filters: bool, segment_bytes: int) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.strict = order == "strict"
        self.world = World(
            self.folder,
            config(
                buffer={"lookahead": LOOKAHEAD, "max_staleness": MAX_STALENESS, "order": order},
                algorithm={"filter_zero_variance": filters},
                trainer={"checkpoint_every": 1},
            ),
            n_prompts=5,
            segment_bytes=segment_bytes,
        )
        self.generators = {"g1": self.world.generator}
        self.serving = {name: PolicyVersion(1, 0) for name in NAMES}
        self.work: dict[str, list[tuple[TrajectoryId, str, int]]] = {name: [] for name in NAMES}
        """What each generator still has to send: (trajectory, uid, steps sent)."""
        self.sent: list[bytes] = []
        self.acknowledged: list[tuple[bytes, int]] = []
        self.trained: dict[int, int] = {}
        """The optimizer step that trained each group on the current history."""

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.drain_everything()
            self.world.journal.close()
            shutil.rmtree(self.folder)

    # -- generators ---------------------------------------------------------------------------------------------------

    @rule(name=st.sampled_from(NAMES))
    def join(self, name: str) -> None:
        self.generators[name] = Generator(self.world.buffer, name)
        self.work[name] = []
        self.serving[name] = max(self.serving[name], self.world.buffer.version)

    @rule(name=st.sampled_from(NAMES))
    def go_on(self, name: str) -> None:
        """A generator's new process goes on after the steps that the buffer has."""
        buffer = self.world.buffer
        self.generators[name] = Generator(buffer, name, resumes=True)
        self.work[name] = []
        held = buffer.ledger.played_by(name)
        for left in buffer.unfinished(name, self.generators[name].incarnation):
            assert held.pop(left.group_id) == list(left.samples)
            self.take(name, left)
        assert not held

    def take(self, name: str, work: Assignment) -> None:
        """A generator has this to play, each trajectory after the steps that the buffer has."""
        steps = work.steps or (b"",) * len(work.samples)
        for sample, attempt, data in zip(work.samples, work.attempts, steps, strict=True):
            indices = sorted(accepted_group(data).steps.index_K.tolist()) if data else []
            assert set(indices) == self.world.buffer.ledger.state.groups[work.group_id].trajectories[sample].indices
            if indices == list(range(len(indices))):  # a crash may have lost one that was not synced
                self.work[name].append((TrajectoryId(work.group_id, sample, attempt), work.prompt_uid, len(indices)))

    @rule(name=st.sampled_from(NAMES))
    def die(self, name: str) -> None:
        if name in self.generators:
            self.world.buffer.leave(name, self.generators[name].incarnation, "its process died")

    @rule(name=st.sampled_from(NAMES))
    def update_weights(self, name: str) -> None:
        self.serving[name] = self.world.buffer.version

    @rule(name=st.sampled_from(NAMES))
    def claim(self, name: str) -> None:
        if name not in self.generators:
            return
        answer = self.generators[name].claim(self.serving[name])
        if isinstance(answer, Assignment):
            self.take(name, answer)

    @rule(name=st.sampled_from(NAMES), ends=st.booleans(), reward=st.sampled_from([0.0, 1.0]), data=st.data())
    def send(self, name: str, ends: bool, reward: float, data: st.DataObject) -> None:
        if not self.work[name]:
            return
        place = data.draw(st.integers(0, len(self.work[name]) - 1))
        of, uid, sent = self.work[name].pop(place)
        steps: list[Step] = []
        if sent < 4 and not (ends and sent):
            steps, sent = [step(of, uid, sent, self.serving[name])], sent + 1
        roles = packed_roles(data.draw(st.lists(st.sampled_from(Role), min_size=sent, max_size=sent)))
        closing = [TrajectoryEnd(of, uid, sent, "stop", reward, roles)] if ends or sent == 4 else []
        if not closing:
            self.work[name].append((of, uid, sent))
        self.submit(self.generators[name].message(steps, closing))

    @rule(name=st.sampled_from(NAMES), rewards=st.sampled_from([(1.0, 0.0), (1.0, 1.0)]))
    def play_a_group(self, name: str, rewards: tuple[float, float]) -> None:
        """So that groups are completed often enough to be trained and given out again."""
        if name in self.generators:
            answer = self.generators[name].claim(self.serving[name])
            if isinstance(answer, Assignment) and any(answer.steps):
                self.take(name, answer)
            elif isinstance(answer, Assignment):
                self.generators[name].finish(answer, self.serving[name], rewards)

    @rule(data=st.data())
    def send_again(self, data: st.DataObject) -> None:
        if self.sent:
            self.submit(self.sent[data.draw(st.integers(0, len(self.sent) - 1))])

    def submit(self, message: bytes) -> None:
        answer = self.world.buffer.submit(message)
        self.sent.append(message)
        if isinstance(answer, Receipt):
            self.acknowledged.append((message, self.world.journal.position))
        else:
            assert answer.reason is RefusalReason.FENCED or answer.reason is RefusalReason.IDENTITY, answer

    # -- the trainer --------------------------------------------------------------------------------------------------

    @rule()
    def lease(self) -> None:
        answer = self.world.buffer.lease(self.world.trainer_incarnation)
        if isinstance(answer, MiniBatch):
            assert len(answer.groups) == len(set(answer.groups)) == 2
            assert not set(answer.groups) & self.trained.keys(), "a group was leased that had been trained"
            for micro_batch in answer.ranks[0]:
                staleness = micro_batch.staleness_N[micro_batch.loss_mask_N]
                assert not len(staleness) or staleness.max() <= MAX_STALENESS

    @rule()
    def commit(self) -> None:
        for lease, held in self.world.buffer.ledger.state.leases.items():
            version = PolicyVersion(self.world.trainer_incarnation, self.world.buffer.version.step + 1)
            assert self.world.buffer.commit(self.world.trainer_incarnation, lease, version) is None
            self.trained |= dict.fromkeys(held.group_ids, version.step)
            break

    @rule()
    def release(self) -> None:
        for lease in self.world.buffer.ledger.state.leases:
            assert self.world.buffer.release(self.world.trainer_incarnation, lease, "not finite") is None
            break

    @rule(back=st.integers(0, 2))
    def trainer_restarts(self, back: int) -> None:
        step = max(self.world.buffer.version.step - back, self.world.buffer.ledger.state.covered)
        self.world.trainer_incarnation = self.world.buffer.join("trainer", "trainer", step)
        self.trained = {group_id: at for group_id, at in self.trained.items() if at <= step}

    @rule()
    def checkpoint(self) -> None:
        self.world.buffer.covered(self.world.buffer.version.step)

    # -- time and crashes ---------------------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([1.0, 6.0, 11.0, 101.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.later(seconds)

    @rule()
    def sync(self) -> None:
        self.world.journal.sync()

    @rule()
    def crash_after_sync(self) -> None:
        digest = fingerprint(self.world.buffer.ledger)
        buffer = self.world.crash()
        assert fingerprint(buffer.ledger) == digest
        self.reconnect()

    @precondition(lambda self: self.world.journal.position == self.world.journal.synced)
    @rule(name=st.sampled_from(NAMES))
    def crash_with_an_unacknowledged_message(self, name: str) -> None:
        digest = fingerprint(self.world.buffer.ledger)
        if self.work[name] and self.world.buffer.ledger.state.generators[name].alive:
            of, uid, sent = self.work[name][0]
            self.world.buffer.submit(self.generators[name].message([step(of, uid, sent, self.serving[name])]))
        assert fingerprint(self.world.crash(synced=False).ledger) == digest
        self.reconnect()

    def reconnect(self) -> None:
        for generator in self.generators.values():
            generator.buffer = self.world.buffer
        synced = self.world.journal.synced
        for message, position in self.acknowledged[-5:]:
            if position <= synced:
                answer = self.world.buffer.submit(message)
                fenced = isinstance(answer, Refusal) and answer.reason is RefusalReason.FENCED
                assert fenced or (isinstance(answer, Receipt) and (answer.duplicate or answer.late)), answer

    # -- what always holds --------------------------------------------------------------------------------------------

    @invariant()
    def the_ledger_is_consistent(self) -> None:
        if hasattr(self, "world"):
            assert violations(self.world.buffer.ledger) == []
            status = self.world.buffer.status()
            assert status.accepted_tokens == sum(status.tokens.values())
            assert sum(status.groups.values()) == status.issued

    def drain_everything(self) -> None:
        """Stop all faults: everything that was issued comes to an end, and the trainer is never stuck."""
        buffer = self.world.buffer
        worker = Generator(buffer, "worker")
        for name in NAMES:
            if name in self.generators:
                buffer.leave(name, self.generators[name].incarnation, "the test ends")
        for _ in range(60):
            self.world.clock.now += 11
            buffer.tick()
            answer = worker.claim(buffer.version)
            if isinstance(answer, Assignment):
                for number, (of, _) in enumerate(answer.trajectories()):
                    steps = [step(of, answer.prompt_uid, index, buffer.version) for index in range(2)]
                    end = TrajectoryEnd(of, answer.prompt_uid, 2, "stop", float(number % 2))
                    assert isinstance(worker.send(steps, [end]), Receipt)
            elif answer.reason is WaitReason.LOOKAHEAD:
                batch = buffer.lease(self.world.trainer_incarnation)
                assert isinstance(batch, MiniBatch), (batch, buffer.status())
                version = PolicyVersion(buffer.version.incarnation, buffer.version.step + 1)
                buffer.commit(self.world.trainer_incarnation, batch.lease, version)
        buffer.drain("max_steps")
        while not isinstance(batch := buffer.lease(self.world.trainer_incarnation), Wait):
            version = PolicyVersion(buffer.version.incarnation, buffer.version.step + 1)
            assert isinstance(batch, MiniBatch)
            buffer.commit(self.world.trainer_incarnation, batch.lease, version)
        assert batch.reason is WaitReason.DRAINED
        buffer.covered(buffer.version.step)
        buffer.end()
        status = buffer.status()
        assert sum(status.ended.values()) == status.issued == status.frontier
        assert status.tokens["open"] == status.tokens["rolled_back"] == status.tokens["stepped"] == 0
        assert violations(buffer.ledger) == []


BufferMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
TestBufferMachine = BufferMachine.TestCase
