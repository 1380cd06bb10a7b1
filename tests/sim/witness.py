"""Checks the promises from outside the buffer, and measures the run."""

from collections import Counter

import numpy as np

from service.errors import BatonError
from service.handoff.buffer import Buffer
from service.handoff.ledger.events import USED, GroupState, Scored, encode
from service.handoff.steps.values import FAILURES
from service.types import MiniBatch, PolicyVersion, Refusal, RefusalReason, TrajectoryId
from tests.invariant import violations
from tests.sim.scenario import SimulationSettings

REASONS = {
    "trained",
    "filtered/zero_variance",
    "expired/run_end",
    "refused/max_attempts",
    "refused/max_lease_attempts",
    "refused/scorer",
}
"""Why a group may end; no group ends for being slow, because attempts end only by death, failure and silence."""


SCORED = (GroupState.SCORING, GroupState.COMPLETE, GroupState.LEASED)


class Broken(BatonError):
    """A promise was broken; the message names it."""


class Witness:
    """Records what generators and the trainer received, and compares it with the buffer's state."""

    def __init__(self, settings: SimulationSettings) -> None:
        self.committed_at: list[float] = []
        """Time of each commit, in order."""
        self.wait_seconds: list[float] = []
        """Seconds that the trainer waited for each mini-batch."""
        self.staleness: Counter[int] = Counter()
        """Number of sampled tokens of trained mini-batches, by staleness."""
        self.trained: dict[int, int] = {}
        """The optimizer step that used each group, by group_id; steps that a restart of the trainer undid are left
        out."""
        self.refusals: Counter[str] = Counter()
        """Messages of generators that the buffer refused, by reason."""
        self._buffer, self._sync_every = settings.buffer, settings.sync_every
        self._max_staleness = settings.max_staleness
        self._acknowledged: dict[int, set[tuple[int, int, int]]] = {}
        """By group_id the (sample, attempt, step index) that the buffer acknowledged."""
        self._scores: dict[int, dict[str, Scored]] = {}
        """By group_id and scorer the answer that was journalled."""
        self._undone = 0
        """Optimizer steps that were undone; as many groups may be trained out of their order in time."""

    def refused(self, refusal: Refusal) -> None:
        """A message was refused: raise Broken if it contradicts an earlier one, since no generator does that."""
        self.refusals[str(refusal.reason)] += 1
        if refusal.reason is RefusalReason.CONFLICT:
            raise Broken(f"a generator's message was refused: {refusal}")

    def acknowledged(self, of: TrajectoryId, index: int) -> None:
        """A generator received the receipt of a step."""
        self._acknowledged.setdefault(of.group_id, set()).add((of.sample, of.attempt, index))

    def leased(self, batch: MiniBatch, waited: float) -> None:
        """The trainer received a mini-batch, for which it had waited `waited` seconds."""
        self.wait_seconds.append(waited)
        for micro_batch in (m for rank in batch.ranks for m in rank):
            ages_N = micro_batch.staleness_N[micro_batch.staleness_N >= 0]
            self.staleness.update(dict(zip(*(a.tolist() for a in np.unique(ages_N, return_counts=True)), strict=True)))
        again = [group_id for group_id in batch.groups if group_id in self.trained]
        if again:
            raise Broken(f"groups {again} are to be trained again; steps {[self.trained[o] for o in again]} used them")
        if len(set(batch.groups)) != self._buffer.mini_batch_size:
            raise Broken(f"a mini-batch of groups {batch.groups}")
        self._check_returns(batch)
        oldest = self._buffer.lookahead + self._sync_every - 1 + self._undone
        for micro_batch in (m for rank in batch.ranks for m in rank):
            ages_N = micro_batch.staleness_N[micro_batch.staleness_N >= 0]
            with_loss_N = micro_batch.staleness_N[micro_batch.loss_mask_N]
            if len(with_loss_N) and with_loss_N.max() > self._max_staleness:
                raise Broken(f"a token {with_loss_N.max()} versions old carries loss")
            if self._buffer.order == "strict" and len(ages_N) and ages_N.max() > oldest:
                raise Broken(
                    f"a token is {ages_N.max()} versions old in strict order, {self._undone} steps were undone"
                )

    def committed(self, version: PolicyVersion, batch: MiniBatch, now: float) -> None:
        """Record that the buffer has confirmed the commit of a mini-batch, with the new policy version `version`."""
        self.committed_at.append(now)
        self.trained.update(dict.fromkeys(batch.groups, version.step))

    def scored(self, buffer: Buffer) -> None:
        """All that happened is on the disk: raise Broken if a scorer's answer is not the one that was journalled."""
        for group_id, group in buffer.ledger.state.groups.items():
            if group.scored and group.state in SCORED:
                for score in buffer._record.store.scores(group_id):
                    before = self._scores.setdefault(group_id, {}).setdefault(score.scorer, score)
                    if encode(before) != encode(score):  # NaN is not itself
                        raise Broken(f"group={group_id} was scored as {before}, and is now {score}")

    def _check_returns(self, batch: MiniBatch) -> None:
        """Raise Broken unless groups have their scorers' rewards, where these replace the environment's."""
        for place, group_id in enumerate(batch.groups):
            said = self._scores.get(group_id, {}).values()
            if any(score.replaces for score in said):
                used = batch.return_G[batch.prompt_of_trajectory_G == place]
                rewards = [score.rewards for score in said if score.rewards is not None]
                expected = np.array(rewards).sum(axis=0)
                if not np.allclose(used, expected[~np.isnan(expected)], atol=1e-9):
                    raise Broken(f"group={group_id} is trained with {used}, and its scorers said {said}")

    def went_back(self, step: int) -> None:
        """A trainer joined at an earlier step."""
        reached = max(self.trained.values(), default=0)
        self._undone += max(reached - step, 0)
        self.trained = {group_id: used for group_id, used in self.trained.items() if used <= step}

    def look(self, buffer: Buffer) -> None:
        """Raise Broken if an acknowledged step is missing or the ledger is inconsistent."""
        ledger = buffer.ledger
        if found := violations(ledger):
            raise Broken("; ".join(found))
        for group_id, steps in list(self._acknowledged.items()):
            group = ledger.state.groups.get(group_id)
            if group is None:
                if group_id < ledger.state.next_group_id:
                    del self._acknowledged[group_id]
                    continue
                raise Broken(f"group={group_id} was acknowledged and is unknown")
            if group.state in USED:
                continue
            for sample, attempt, index in steps:
                trajectory = group.trajectories[sample] if group.trajectories else None
                if trajectory is None or trajectory.given_up:  # for one of the reasons that the end checks
                    continue
                if trajectory.attempt == attempt and index not in trajectory.indices:
                    raise Broken(
                        f"step {index} of {TrajectoryId(group_id, sample, attempt)} was acknowledged and is gone"
                    )

    def check_the_end(self, buffer: Buffer) -> None:
        """After the drain: raise Broken unless every issued group ended with a reason and the tokens add up."""
        status = buffer.status()
        if sum(status.ended.values()) != status.issued or buffer.ledger.state.groups:
            raise Broken(f"{status.issued} groups were issued, ended are {status.ended}")
        if status.accepted_tokens != sum(status.tokens.values()) or status.tokens["open"]:
            raise Broken(f"{status.accepted_tokens} tokens were accepted, their fates are {status.tokens}")
        if strange := status.ended.keys() - REASONS:
            raise Broken(
                f"groups ended as {strange}, for which there is no reason in a world without deadlines for length"
            )
        if strange := status.given_up.keys() - {*FAILURES, RefusalReason.SCORER}:
            raise Broken(f"trajectories were given up for {strange}")
        if status.ended.get("trained", 0) != len(self.trained):
            raise Broken(f"the trainer used {len(self.trained)} groups, the buffer counts {status.ended}")
