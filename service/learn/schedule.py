"""The learning rate of each optimizer step."""

from __future__ import annotations

import math

from service.config.learn import TrainerConfig


def learning_rate(trainer: TrainerConfig, step: int, max_steps: int) -> float:
    """The rate of the step after `step` applied ones: linear warm-up, then the schedule until `max_steps`."""
    if step < trainer.warmup_steps:
        return trainer.lr * (step + 1) / trainer.warmup_steps
    done = min(1.0, (step - trainer.warmup_steps) / max(1, max_steps - trainer.warmup_steps))
    match trainer.schedule:
        case "constant":
            share = 1.0
        case "linear":
            share = 1.0 - done
        case "cosine":
            share = (1.0 + math.cos(math.pi * done)) / 2
    return trainer.lr * (trainer.min_lr_fraction + (1.0 - trainer.min_lr_fraction) * share)
