"""Scorers in a simulation: workers that answer after some time, within the deadline and attempts of their settings."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from service.config.rollout import ScorerConfig
from service.handoff.scoring import Answer, Scoring
from service.simulate.loop import Activity, Loop, Process, Waiting


class SimulatedScorers(Process):
    """Scores every waiting group, with as many groups at once as the scorer has workers."""

    def __init__(
        self,
        scorers: Mapping[str, ScorerConfig],
        scoring: Scoring,
        loop: Loop,
        settled: Waiting,
        mean_seconds: float,
        rng: np.random.Generator,
    ) -> None:
        """`settled`: waits until all events are on the disk; `mean_seconds`: mean time of an answer."""
        super().__init__(loop)
        self._scorers, self._scoring, self._settled = scorers, scoring, settled
        self._mean_seconds, self._rng = mean_seconds, rng
        self._asked: dict[str, set[int]] = {name: set() for name in scorers}

    def look(self) -> None:
        """Start to score waiting groups on free workers."""
        for name, asked in self._asked.items():
            waiting = [group_id for group_id in self._scoring.pending(name) if group_id not in asked]
            for group_id in waiting[: self._scorers[name].workers - len(asked)]:
                asked.add(group_id)
                self.run(self._ask(name, group_id))

    def _ask(self, name: str, group_id: int) -> Activity:
        scorer, answer = self._scorers[name], self._answer(name, group_id)
        for _ in range(scorer.attempts):
            seconds = float(self._rng.exponential(self._mean_seconds))
            yield self.wait(min(seconds, scorer.deadline))
            if seconds <= scorer.deadline:
                self._scoring.accept(group_id, name, answer)
                break
            self._scoring.failed(name, "deadline", "")
        else:
            self._scoring.give_up(group_id, name, "deadline")
        self._asked[name].discard(group_id)
        yield self._settled

    def _answer(self, name: str, group_id: int) -> Answer:
        _, group = self._scoring.group(group_id)
        if self._scorers[name].kind == "teacher":
            return Answer(logprobs=np.full(int(np.count_nonzero(group.steps.loss_mask_N)), -1.0, np.float32))
        return Answer([sample / 8 for sample in range(len(group.ends))])
