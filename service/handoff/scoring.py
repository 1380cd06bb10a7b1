"""Scoring: which groups wait for which scorers, and what the scorers' answers change.

    claim -> Issued(7, scorers=("judge",)) ; .. ; last trajectory complete -> state SCORING ;
    accept(7, "judge", ..) -> Scored -> state COMPLETE

The scorers of a group are journalled when it is issued, and the first answer of each is journalled before the group can
be leased. So a scorer may be asked again after a crash; its new answer counts only if no earlier answer was journalled.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from service.handoff.batches.filters import FilterSettings, examine
from service.handoff.group_bytes import INFO_BYTES
from service.handoff.ledger import events
from service.handoff.ledger.events import UNFINISHED, GroupState
from service.handoff.ledger.ledger import unrewarded
from service.handoff.ledger.record import Record
from service.handoff.ledger.scores import LOGPROBS
from service.handoff.steps.values import NEEDED, is_reward
from service.handoff.validate import LOGPROB_TOLERANCE, MIN_LOGPROB
from service.handoff.verbs import ScorerStatus
from service.types import Float32s, Refusal, RefusalReason, Sender, StepGroup

log = logging.getLogger(__name__)

REMOVED = "removed"
"""The reason with which a group continues without a scorer that the configuration of a resumed run no longer has."""


class Answer(NamedTuple):
    """A scorer's answer about a group."""

    rewards: Sequence[float] | None = None
    """[G] the reward of each trajectory, by sample; None if the scorer is a teacher."""
    info: Sequence[str] = ()
    """[G] a text about each trajectory, shown in the trajectory's record; empty: no texts."""
    logprobs: Float32s | None = None
    """The teacher's log-probability of each sampled token of the group, ordered as `ledger.scores.sampled_tokens`."""


@dataclass(frozen=True, slots=True)
class ScorerSettings:
    """The settings of a scorer, as far as the buffer needs them."""

    kind: Literal["rewards", "teacher"] = "rewards"
    weight: float = 1.0
    """Factor by which the scorer's reward is multiplied."""
    combine: Literal["replace", "add"] = "replace"
    """Whether the reward replaces the environment's reward or is added to it."""
    fallback: Literal["refuse", "environment_reward"] = "refuse"
    """Whether a group for which the scorer gave no valid answer is refused, or continues without the scorer."""


class Scoring:
    """Handles the answers of scorers; every change is an event of the record."""

    def __init__(
        self,
        scorers: Mapping[str, ScorerSettings],
        filters: FilterSettings,
        record: Record,
        teacher_of_row: Sequence[str] | None,
    ) -> None:
        """`teacher_of_row`: the name of each row's teacher, empty for none; None: all rows have the same teacher."""
        self._scorers, self._filters, self._record = scorers, filters, record
        self._always = tuple(name for name, scorer in scorers.items() if scorer.kind == "rewards")
        self._teacher_of_row = teacher_of_row
        self._only_teacher = tuple(name for name, scorer in scorers.items() if scorer.kind == "teacher")[:1]
        self._status = {name: ScorerStatus() for name in scorers}
        self.failures: dict[tuple[str, str], str] = {}
        """The first failure for each scorer and reason, in words."""
        self.in_a_row: Counter[str] = Counter()
        """For each scorer, the number of groups refused since its last valid answer."""
        self._refused_at: dict[str, float] = {}
        """For each scorer that gave a valid answer before: when the first of these groups was refused."""
        for group_id, group in list(record.ledger.state.groups.items()):
            for name in group.awaited:  # also of groups that are not finished yet
                if name not in scorers and group.state in (*UNFINISHED, GroupState.SCORING):
                    self._add(events.Scored(group_id, name, fallback=REMOVED))

    def of_row(self, row: int) -> tuple[str, ...]:
        """The names of the scorers that score the groups of a dataset row."""
        teacher = self._only_teacher if self._teacher_of_row is None else (self._teacher_of_row[row],)
        return (*self._always, *filter(None, teacher))

    def pending(self, scorer: str) -> list[int]:
        """The group_ids of the groups that wait for a scorer, in the order in which the groups finished."""
        groups = self._record.ledger.state.groups
        return [group_id for group_id in self._record.ledger.scoring if scorer in groups[group_id].awaited]

    def group(self, group_id: int) -> tuple[int, StepGroup]:
        """(Dataset row, step group) of a group that waits for scorers; steps and end records are sorted by sample."""
        sender = Sender("", 0, group_id)
        return self._record.ledger.state.groups[group_id].row, StepGroup(sender, *self._record.store.unscored(group_id))

    def accept(self, group_id: int, scorer: str, answer: Answer) -> Refusal | None:
        """Journal a scorer's answer about a group, if it is still needed.

        The group continues without trajectories whose reward, or sum of rewards, is invalid; the answer is refused if
        fewer than two would remain.
        """
        if not self.awaits(group_id, scorer):
            return None
        if (wrong := self._wrong(group_id, scorer, answer)) is not None:
            return wrong
        settings, rewards = self._scorers[scorer], self._rewards(group_id, scorer, answer)
        group, ends = self._record.ledger.state.groups[group_id], self._record.store.of(group_id).ends
        for sample in unrewarded(group, rewards or ()):
            if sample not in group.unrewarded:
                why = f"group={group_id}/sample={sample}: its reward is not {NEEDED}; its group continues without it"
                log.warning("scorer %s: %s", scorer, why)
                self.failed(scorer, RefusalReason.REWARD, why)
                self._record.lost(ends[sample], RefusalReason.SCORER)
        teacher = b"" if answer.logprobs is None else np.ascontiguousarray(answer.logprobs, LOGPROBS).tobytes()
        info = tuple(text.encode(errors="replace")[:INFO_BYTES].decode(errors="ignore") for text in answer.info)
        replaces = rewards is not None and settings.combine == "replace"
        self._status[scorer].scored += 1
        self.in_a_row[scorer] = 0
        self._add(events.Scored(group_id, scorer, rewards, replaces, info, teacher))
        return None

    def failed(self, scorer: str, reason: str, detail: str) -> None:
        """Count that a scorer gave no valid answer; the caller asks again or calls `give_up`."""
        self._status[scorer].failures[reason] += 1
        self.failures.setdefault((scorer, reason), detail)
        self._status[scorer].last_failure = f"{reason}: {detail}" if detail else reason

    def took(self, scorer: str, seconds: float) -> None:
        self._status[scorer].seconds += seconds

    def give_up(self, group_id: int, scorer: str, reason: str) -> None:
        """Stop waiting for a scorer's answer about a group; the scorer's `fallback` says what happens to the group."""
        if not self.awaits(group_id, scorer):
            return
        if self._scorers[scorer].fallback == "refuse":
            self._status[scorer].refused += 1
            if not self.in_a_row[scorer] and self._status[scorer].scored:
                self._refused_at[scorer] = time.monotonic()
            self.in_a_row[scorer] += 1
            self._record.add(events.Ended(group_id, GroupState.REFUSED, RefusalReason.SCORER))
        else:
            self._status[scorer].fallbacks += 1
            self._add(events.Scored(group_id, scorer, fallback=reason))

    def refused(self) -> dict[str, tuple[int, float]]:
        """For each scorer, the number of groups refused since its last valid answer, and the seconds since the first of
        these refusals (infinite if the scorer never gave a valid answer)."""
        now = time.monotonic()
        return {name: (many, now - self._refused_at.get(name, -math.inf)) for name, many in self.in_a_row.items()}

    def awaits(self, group_id: int, scorer: str) -> bool:
        ledger = self._record.ledger
        return group_id in ledger.scoring and scorer in ledger.state.groups[group_id].awaited

    def status(self) -> dict[str, ScorerStatus]:
        """The counts of each scorer since this process started, by name of the scorer."""
        for name, status in self._status.items():
            status.waiting = len(self.pending(name))
        return self._status

    def _add(self, event: events.Scored) -> None:
        self._record.add(event)
        examine(self._record, self._filters)

    def _wrong(self, group_id: int, scorer: str, answer: Answer) -> Refusal | None:
        trajectories = [t for t in self._record.ledger.state.groups[group_id].trajectories if not t.given_up]
        path = f"scorers.{scorer}"
        if self._scorers[scorer].kind == "teacher":
            logprobs = np.zeros(0, np.float32) if answer.logprobs is None else answer.logprobs
            if logprobs.shape != (n_sampled := sum(trajectory.tokens for trajectory in trajectories),):
                return Refusal(RefusalReason.LENGTH_MISMATCH, f"{path}: {n_sampled} sampled tokens", logprobs.size)
            fine = (logprobs <= LOGPROB_TOLERANCE) & (logprobs >= MIN_LOGPROB)
            return None if fine.all() else Refusal(RefusalReason.LOGPROB, path, float(logprobs[fine.argmin()]))
        for what, given in (("rewards", answer.rewards or ()), ("texts", answer.info or trajectories)):
            if len(given) != len(trajectories):
                return Refusal(RefusalReason.LENGTH_MISMATCH, f"{path}: {len(trajectories)} {what}", len(given))
        group, rewards = self._record.ledger.state.groups[group_id], self._rewards(group_id, scorer, answer) or ()
        lost = unrewarded(group, rewards)
        # A trajectory alone in its group has no baseline.
        if lost and len(trajectories) - len(group.unrewarded.union(lost)) < 2:
            reward = next(each for each, of in zip(answer.rewards or (), rewards, strict=True) if math.isnan(of))
            return Refusal(RefusalReason.REWARD, f"{path}: {NEEDED}", reward)
        return None

    def _rewards(self, group_id: int, scorer: str, answer: Answer) -> tuple[float, ...] | None:
        """The weighted rewards; NaN where a reward, or its sum with the rewards so far, is not accepted."""
        if answer.rewards is None:
            return None
        settings, store = self._scorers[scorer], self._record.store
        earlier = [each for each in store.scores(group_id) if each.rewards]
        added = settings.combine == "add" and not any(each.replaces for each in earlier)
        ends = store.of(group_id).ends
        so_far = [ends[sample].reward if added else 0.0 for sample in sorted(ends)]
        columns = zip(answer.rewards, so_far, *(each.rewards or () for each in earlier), strict=True)
        weighted = [(settings.weight * float(reward), sum(others)) for reward, *others in columns]
        return tuple(own if is_reward(own) and is_reward(own + others) else math.nan for own, others in weighted)
