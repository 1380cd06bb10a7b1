"""The buffer without Ray: the five verbs.

Each verb decides on changes and adds every change to the record, as an event or as the accepted message itself:

    claim -> Issued(7) ; submit -> all steps of 7, which is then complete ; lease -> Leased(1, (7, ..)) ;
    commit -> Committed(1, version 1:1)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

from service.clock import Clock
from service.errors import RunFailed
from service.handoff.attempts import RUN_END, Attempts
from service.handoff.batches.batch import BatchResult
from service.handoff.batches.filters import examine
from service.handoff.buffer_settings import BufferSettings, opening
from service.handoff.claims import Admission, Claims
from service.handoff.group_bytes import JOURNAL_SEGMENTS
from service.handoff.journal.journal import Journal
from service.handoff.leases import BatchJob, Leases, Waits
from service.handoff.ledger import events
from service.handoff.ledger.accept import new_content
from service.handoff.ledger.events import USED, GroupState
from service.handoff.ledger.record import OnEnd, OnFailure
from service.handoff.ledger.replaying import load_groups, opened_record
from service.handoff.ledger.scores import CompleteGroup
from service.handoff.ledger.state import distance
from service.handoff.prompt_order import Curriculum, Prompts
from service.handoff.scoring import Scoring
from service.handoff.steps.tables import end_objects
from service.handoff.steps.values import FAILURES
from service.handoff.steps.wire import decode, encode
from service.handoff.validate import refusal
from service.handoff.verbs import LEAVES, RESUMED, Assignment, BufferStatus, Claim, Receipt, Wait, WaitReason
from service.types import MiniBatch, PolicyVersion, Refusal, RefusalReason, Sender, StepGroup, TrajectoryId


class Buffer:
    """Gives prompts to generators, accepts their steps, and leases mini-batches to the trainer; single-threaded."""

    def __init__(
        self,
        settings: BufferSettings,
        prompt_uids: Sequence[str],
        journal: Journal,
        clock: Clock,
        rows_digest: str = "",
        teacher_of_row: Sequence[str] | None = None,
    ) -> None:
        """`rows_digest`: a digest of the dataset's rows; a run continues only with the same digest and prompt uids.

        `teacher_of_row`: the name of each row's teacher, empty for none; None: all rows have the same teacher.

        Raises:
            JournalError: the journal is damaged.
            UserError: the journal's run began with other rows or settings.
        """
        self._settings, self._clock = settings, clock
        prompts = Prompts(prompt_uids, settings.seed, settings.shuffle)
        self._admission = Admission(settings)
        journal.segment_bytes = min(journal.segment_bytes, settings.max_journal_bytes // JOURNAL_SEGMENTS)
        self._record = opened_record(opening(settings, prompt_uids, rows_digest), settings.limits, journal, clock)
        self.ledger = self._record.ledger
        self._attempts = Attempts(settings.attempts, settings.filters, self._record)
        self._leases = Leases(settings, self._record)
        self._waits = Waits(settings, self._record)
        self._curriculum = Curriculum(settings.curriculum, prompts, self.ledger)
        self.scoring = Scoring(settings.scorers, settings.filters, self._record, teacher_of_row)
        """Takes the answers of scorers; groups wait for scorers between their last submit and their lease."""
        self._claims = Claims(self._record, self._curriculum, self._admission, self._waits, self.scoring)
        self._shares = settings.mini_batch_size if settings.order == "strict" else settings.max_generators
        """Number of shares of the groups that a mini-batch lacks: one per generator, or per group in strict order."""
        self._refused: Counter[str] = Counter()
        self._duplicates = 0
        self._late = 0
        examine(self._record, settings.filters)

    # -- the five verbs -----------------------------------------------------------------------------------------------

    def claim(self, claim: Claim) -> Assignment | Wait | Refusal:
        """Give work to a generator: trajectories to restart, or the next prompt if it is admitted.

        A repeated claim gets the unfinished part of its first answer.
        """
        if (fenced := self._fenced(claim.generator, claim.incarnation)) is not None:
            return fenced
        if self.ledger.history.published.get(claim.serving.pack()) != claim.serving:
            return self._refuse(Refusal(RefusalReason.VERSION, "serving", claim.serving.step))
        return self._claims.answer(claim)

    def claim_several(self, claim: Claim, most: int) -> list[Assignment] | Wait | Refusal:
        """Give a generator up to `most` groups, as `most` claims with consecutive request ids would."""
        given: list[Assignment] = []
        for number in range(most):
            answer = self.claim(claim._replace(request_id=claim.request_id + number))
            if isinstance(answer, Assignment):
                given.append(answer)
            elif isinstance(answer, Refusal) or answer.reason is not WaitReason.ANSWERED:
                break
        return given or answer  # type: ignore[return-value]

    def submit(self, data: bytes) -> Receipt | Refusal:
        """Accept a step group; the receipt is valid once all frames that the journal has now are on the disk."""
        message = decode(data, self._settings.limits)
        if isinstance(message, Refusal):
            return self._refuse(message)
        sender = message.sender
        if (fenced := self._fenced(sender.generator, sender.incarnation)) is not None:
            return fenced
        answer = refusal(message, self._settings.limits) or self._accept(data, message)
        if isinstance(answer, Refusal):
            self._attempts.restart_refused(message, answer)
            return self._refuse(answer)
        self._duplicates += answer.duplicate
        size = self._settings.mini_batch_size
        lacks = size - len(self.ledger.finished) % size
        return answer._replace(wanted=max(lacks // self._shares, 1))

    def _accept(self, data: bytes, message: StepGroup) -> Receipt | Refusal:
        is_new, late = False, tuple[TrajectoryId, ...]()
        if not self.ledger.received(message.sender):
            new = new_content(self.ledger, self._record.store, message, self._settings.worst.trajectory)
            if isinstance(new, Refusal):
                return new
            is_new, late = bool(new.additions or new.late), new.late
            self._late += bool(late)
            if new.additions:
                kept = new.only(message, len(data))
                self._record.accept(data if kept is message else encode(kept), message, new.additions)
                examine(self._record, self._settings.filters)
        for end in end_objects(message.ends):
            if end.stop_reason in FAILURES and self.ledger.plays(message.sender, end.trajectory):
                self._record.lost(end, end.stop_reason)
                self._attempts.lose(end.trajectory.group_id, end.trajectory.sample, end.stop_reason)
                is_new = True
        return Receipt(not is_new, late)

    def lease(self, trainer_incarnation: int) -> MiniBatch | Wait | Refusal:
        """Lease the next mini-batch to the trainer; while a lease is open, return the mini-batch of that lease."""
        answer = self.begin_lease(trainer_incarnation)
        return self.finish_lease(answer, answer.run()) if isinstance(answer, BatchJob) else answer

    def begin_lease(self, trainer_incarnation: int) -> MiniBatch | Wait | Refusal | BatchJob:
        """Like `lease`, but where `lease` forms a mini-batch, return a job; the job's result goes to `finish_lease`."""
        if trainer_incarnation != self.ledger.state.trainer_incarnation:
            return self._refuse(Refusal(RefusalReason.FENCED, "trainer_incarnation", trainer_incarnation))
        if self.ledger.state.leases:
            return self._leases.again(next(iter(self.ledger.state.leases)))
        if (why := self._waits.lease_wait()) is not None:
            return self._waits.begin("trainer", *why)
        return self._leases.begin(trainer_incarnation)

    def finish_lease(self, job: BatchJob, made: BatchResult | list[int]) -> MiniBatch | Wait | Refusal:
        """Lease the mini-batch that a job formed. Form another one in this thread if the trainer, the version or a
        group has changed, or if `made` lists groups without a finite advantage, which are then refused."""
        if isinstance(made, list):
            groups = self.ledger.state.groups
            for group_id in made:
                if group_id in groups and groups[group_id].state is GroupState.COMPLETE:
                    self._record.add(events.Ended(group_id, GroupState.REFUSED, RefusalReason.ADVANTAGE))
            return self.lease(job.trainer_incarnation)
        if (batch := self._leases.finish(job, made)) is None:
            return self.lease(job.trainer_incarnation)
        self._waits.end("trainer")
        return batch

    def commit(self, trainer_incarnation: int, lease: int, version: PolicyVersion) -> Refusal | None:
        """Record that the optimizer step of a lease was applied and made policy version `version`. Idempotent."""
        state, current = self.ledger.state, self.ledger.history.current
        if trainer_incarnation != state.trainer_incarnation:
            return self._refuse(Refusal(RefusalReason.FENCED, "trainer_incarnation", trainer_incarnation))
        if lease == state.last_commit and version == current:
            return None
        if lease not in state.leases:
            return self._refuse(Refusal(RefusalReason.LEASE, "lease", lease))
        if version != PolicyVersion(current.incarnation, current.step + 1):
            return self._refuse(Refusal(RefusalReason.VERSION, "version", version.step))
        self._record.add(events.Committed(lease, version, final=not self._settings.has_checkpoints))
        return None

    def release(self, trainer_incarnation: int, lease: int, reason: str) -> Refusal | None:
        """End a lease without an optimizer step: its groups wait for another lease, if one is left. Idempotent."""
        if trainer_incarnation != self.ledger.state.trainer_incarnation:
            return self._refuse(Refusal(RefusalReason.FENCED, "trainer_incarnation", trainer_incarnation))
        state = self.ledger.state
        if lease in state.leases:
            self._leases.release(lease, reason)
        elif lease == state.last_commit or not 0 < lease < state.next_lease:
            return self._refuse(Refusal(RefusalReason.LEASE, "lease", lease))
        return None

    # -- other operations ---------------------------------------------------------------------------------------------

    def join(
        self, role: Literal["generator", "trainer"], name: str, step: int | None = None, resumes: bool = False
    ) -> int:
        """Admit a new incarnation of a generator or of the trainer, and return its number; calls of older ones are
        refused from now on.

        With `resumes`, other generators continue the trajectories that this one leaves unfinished. A trainer continues
        from `step` (by default the newest): groups that were trained later are leased again.
        """
        state = self.ledger.state
        if role == "trainer":
            if step is not None and not 0 <= step <= state.step:
                raise RunFailed(
                    f"a trainer would continue from step {step}, but the journal holds the steps 0 to {state.step}: "
                    "continue from a checkpoint of this run"
                )
            if step is not None and step != state.step and not self._settings.has_checkpoints:
                raise RunFailed(
                    f"a trainer would continue from step {step}, but step {state.step} was applied and the "
                    "groups trained since are not kept: set trainer.checkpoint_every to survive the loss of a trainer"
                )
            for lease in list(state.leases):
                self._leases.release(lease, "a new trainer joined")
            incarnation = state.trainer_incarnation + 1
        else:
            self.leave(name, None, "rejoined")
            incarnation = state.generators[name].incarnation + 1 if name in state.generators else 1
        self._record.add(events.Joined(role, name, incarnation, state.step if step is None else step, resumes))
        return incarnation

    def renew(self, generator: str, incarnation: int, trajectories: Sequence[TrajectoryId], call: bool = False) -> None:
        """Restart the `buffer.step_deadline` of trajectories. `call`: they moved here, and now call the policy."""
        for of in trajectories:
            if self.ledger.plays(Sender(generator, incarnation, 0), of):
                self.ledger.renew((of.group_id, of.sample), self._clock.monotonic())
                if call:
                    self._attempts.called.setdefault(generator, set()).add((of.group_id, of.sample))

    def leave(self, generator: str, incarnation: int | None, reason: str) -> None:
        """Remove a generator; other generators continue its unfinished trajectories, or start them again."""
        member = self.ledger.state.generators.get(generator)
        if member is None or incarnation not in (None, member.incarnation) or not member.alive:
            return
        self._record.add(events.Left(generator, member.incarnation, reason))
        self._waits.end(f"generator {generator}")
        self._attempts.leave(generator, died=reason not in (LEAVES, RESUMED))

    def covered(self, step: int, oldest_kept: int | None = None) -> None:
        """Record that a durable checkpoint covers `step`; a trainer can go back to `oldest_kept` (default: `step`)."""
        self._record.add(events.Covered(step, step if oldest_kept is None else oldest_kept))

    def drain(self, reason: str) -> None:
        """Stop issuing prompts; groups with trajectories that no generator plays end with the reason `run_end`."""
        if self.ledger.state.draining is None:
            self._record.add(events.Drained(reason))
            for group_id in sorted({group_id for group_id, _ in self.ledger.unassigned}):
                self._record.add(events.Ended(group_id, GroupState.EXPIRED, RUN_END))

    def resume(self) -> None:
        """Issue prompts again after `drain`, in a resumed run, whose earlier generators are all gone."""
        if self.ledger.state.draining is not None:
            self._record.add(events.Drained(None))
        for name, member in self.ledger.state.generators.items():
            self.leave(name, member.incarnation, RESUMED)

    def end(self) -> None:
        """End the run: groups that no optimizer step used expire with the reason `run_end`."""
        self.drain(RUN_END)
        for lease in list(self.ledger.state.leases):
            self._record.add(events.Released(lease, RUN_END))
        for group_id in [o for o, group in self.ledger.state.groups.items() if group.state not in USED]:
            self._record.add(events.Ended(group_id, GroupState.EXPIRED, RUN_END))

    def tick(self) -> None:
        """Restart silent trajectories, release overdue leases, end overdue groups, and record if the disk is full."""
        now = self._clock.monotonic()
        self._attempts.restart_silent(now)
        self._leases.release_overdue()
        self._attempts.end_overdue_groups(now)
        if (stalled := self._record.journal.stalled) is not None:
            self._waits.begin("journal", WaitReason.DISK, stalled)
        else:
            self._waits.end("journal")

    @property
    def revision(self) -> int:
        """Number of events so far; while it stays the same, only deadlines can change the result of a verb."""
        return self._record.revision

    @property
    def version(self) -> PolicyVersion:
        """The newest published version."""
        return self.ledger.history.current

    def watch_ends(self, on_end: OnEnd, on_failure: OnFailure | None = None) -> None:
        """Call `on_end` whenever a group ends untrained, `on_failure` when an attempt fails."""
        self._record.on_end, self._record.on_failure = on_end, on_failure

    def complete_group(self, group_id: int) -> CompleteGroup:
        """A group that is complete or leased, with its steps and end records."""
        return load_groups(self._record, [group_id])[0]

    def status(self) -> BufferStatus:
        ledger, state, record = self.ledger, self.ledger.state, self._record
        return BufferStatus(
            revision=record.revision,
            policy_version=ledger.history.current,
            groups={str(s): ledger.in_state[s] for s in GroupState},
            ended=dict(state.ended),
            accepted_tokens=state.accepted,
            tokens={str(fate): count for fate, count in state.fates.items()},
            issued=state.next_group_id,
            lookahead=self._settings.lookahead,
            lengths=state.lengths.export(),
            length_distance=distance(state.lengths.generated, state.lengths.trained),
            token_length_distance=distance(state.lengths.generated_tokens, state.lengths.loss_tokens),
            n_bytes=record.n_bytes,
            reserved_bytes=self._admission.reserved(record),
            waits=self._waits.current(),
            refused=dict(self._refused),
            restarts=dict(state.restarts),
            given_up=dict(state.given_up),
            duplicates=self._duplicates,
            late=self._late,
            journal_start=record.journal.start,
            journal_position=record.journal.position,
            journal_synced=record.journal.synced,
            journal_limit_bytes=self._admission.journal_limit(record.journal),
            draining=state.draining,
            prompts=self._curriculum.counts(),
            passed_over=state.next_place - state.next_group_id,
            scorers=self.scoring.status(),
        )

    # -- decisions ----------------------------------------------------------------------------------------------------

    def _fenced(self, generator: str, incarnation: int) -> Refusal | None:
        member = self.ledger.state.generators.get(generator)
        if member is None or member.incarnation != incarnation or not member.alive:
            return self._refuse(Refusal(RefusalReason.FENCED, "incarnation", incarnation))
        return None

    def _refuse(self, refused: Refusal) -> Refusal:
        self._refused[str(refused.reason)] += 1
        return refused
