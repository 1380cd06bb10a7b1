"""Supervised steps on conversations: the warm start before RL, and `baton sft`.

The loss is the mean cross-entropy of the tokens that carry loss, over all ranks. Supervised steps have a separate
optimizer, so that RL begins with new Adam moments.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from service.errors import RunFailed
from service.learn.device_batch import unsampled_micro_batch
from service.learn.losses.step_metrics import Sums
from service.learn.model.optimizer import Optimizer, square_norm
from service.learn.model.policy import Policy
from service.learn.settings import LearnSettings
from service.types import MicroBatch, SupervisedRow

WARM_UP_FRACTION = 0.1
"""Fraction of the supervised steps over which the learning rate rises."""


class SupervisedSteps:
    """Supervised optimizer steps on one rank; every rank must call the same methods."""

    def __init__(self, settings: LearnSettings, policy: Policy) -> None:
        self._settings, self._policy = settings, policy
        self._optimizer = Optimizer(policy.master_weights, settings.trainer.betas, settings.trainer.weight_decay)

    def warm_start(self, demonstrations: Sequence[SupervisedRow]) -> float:
        """Take all steps that `model.warm_start` asks for, on randomly chosen demonstrations; returns the loss of the
        last step.

        The learning rate is the smaller of a linear rise over the first tenth of the steps and a linear fall over all
        steps.
        """
        start = self._settings.model.warm_start
        if start is None:
            raise ValueError("warm_start was called without model.warm_start in the configuration")
        rng = np.random.default_rng(self._settings.seed)
        loss = float("nan")
        for step in range(start.steps):
            chosen = rng.choice(len(demonstrations), size=start.batch_size, replace=False)
            rise = min(1.0, (step + 1) / (WARM_UP_FRACTION * start.steps))
            loss = self.step([demonstrations[i] for i in chosen], lr=start.lr * min(rise, 1.0 - step / start.steps))
        return loss

    def step(self, rows: Sequence[SupervisedRow], lr: float) -> float:
        """Take one optimizer step on these rows, each rank on its part of them; returns the mean loss per token.

        Raises:
            RunFailed: the loss or the gradient is not finite.
            OutOfMemory: the device has too little memory; the ranks cannot continue.
        """
        micros, n_tokens = self._packed(rows)
        policy = self._policy
        sums = Sums(policy.device, policy.world_size)
        with policy.gradients_dropped_on_error():
            for micro in micros:
                loss = -policy.model(policy.to_device(micro)).logprob_M.sum() / n_tokens
                loss.backward()
                sums.add("loss", loss)
            sums.add("grad_square", square_norm(policy.master_weights.gradients(), policy.device) / policy.n_copies)
            totals = sums.totals()
            if not math.isfinite(totals["loss"] + totals["grad_square"]):
                raise RunFailed(
                    f"supervised step: the loss is {totals['loss']} and the squared gradient norm "
                    f"{totals['grad_square']}; lower model.warm_start.lr, or trainer.lr of baton sft"
                )
            self._optimizer.step(lr, math.sqrt(totals["grad_square"]), self._settings.trainer.max_grad_norm)
        return totals["loss"]

    def loss(self, rows: Sequence[SupervisedRow]) -> float:
        """The mean loss per token of these rows; takes no optimizer step."""
        micros, n_tokens = self._packed(rows)
        policy = self._policy
        sums = Sums(policy.device, policy.world_size)
        for logprob in policy.logprobs([policy.to_device(micro) for micro in micros]):
            sums.add("loss", -logprob.sum() / n_tokens)
        return sums.totals()["loss"]

    def _packed(self, rows: Sequence[SupervisedRow]) -> tuple[list[MicroBatch], int]:
        """This rank's micro-batches, and the number of loss tokens on all ranks. Empty micro-batches are added so that
        all ranks have equally many."""
        policy = self._policy
        micros = _pack(rows[policy.batch_part :: policy.n_batch_parts], self._settings.trainer.tokens_of_micro_batch)
        sums, mine = Sums(policy.device, policy.world_size), sum(int(micro.loss_mask_N.sum()) for micro in micros)
        sums.add("tokens", torch.tensor(mine, device=policy.device))
        sums.max("micros", torch.tensor([len(micros)], device=policy.device))
        totals = sums.totals()
        n_tokens = int(totals["tokens"]) // policy.slice.of
        if n_tokens == 0:
            raise ValueError("no token of the supervised rows is to be learned")
        return micros + [unsampled_micro_batch([])] * (int(totals["micros"]) - len(micros)), n_tokens


def _pack(rows: Sequence[SupervisedRow], max_tokens: int) -> list[MicroBatch]:
    """Pack rows, in order, into micro-batches of at most `max_tokens`; a longer row gets a micro-batch of its own."""
    packs: list[list[SupervisedRow]] = []
    room = 0
    for row in rows:
        if not packs or len(row.token_ids) > room:
            packs.append([])
            room = max_tokens
        packs[-1].append(row)
        room -= len(row.token_ids)
    return [unsampled_micro_batch(pack) for pack in packs]
