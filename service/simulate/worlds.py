"""Worlds full of faults, each drawn from its seed."""

from __future__ import annotations

import numpy as np

from service.config import Config
from service.simulate.scenario import Faults, Scenario
from service.simulate.world import World

FAULT_SECONDS = 25.0


def fault_world(seed: int) -> World:
    """A small world in which every kind of fault may happen, with settings that may be anything allowed."""
    rng = np.random.default_rng((seed, 99))
    scenario = Scenario(
        generators=3,
        turns=3,
        median_tokens=12.0,
        sigma=0.7,
        token_seconds=0.05,
        linger_seconds=0.02,
        trainer_seconds=1.0,
        steps=6,
        faults=_faults(rng),
    )
    return World(_config(rng), scenario, seed, segment_bytes=int(rng.choice([1, 3_000, 1 << 20])))


def _config(rng: np.random.Generator) -> Config:
    lookahead = int(rng.integers(0, 4))
    return Config.model_validate(
        {
            "env": {"max_turns": 3},
            "generator": {"max_input_length": 256, "max_generate_length": 64, "concurrent_groups": 6},
            "buffer": {
                "lookahead": lookahead,
                "max_staleness": int(rng.integers(lookahead, 6)),
                "order": str(rng.choice(["finished_first", "strict"])),
                "step_deadline": 8.0,
                "lease_deadline": 20.0,
                "max_attempts": 20,
                "max_lease_attempts": 10,
            },
            "algorithm": {"n_samples_per_prompt": 2, "filter_zero_variance": bool(rng.integers(2))},
            "trainer": {
                "mini_batch_size": 2,
                "ranks": int(rng.integers(1, 3)),
                "max_tokens_per_micro_batch": 1024,
                "checkpoint_every": int(rng.integers(1, 4)),
            },
        }
    )


def _faults(rng: np.random.Generator) -> Faults:
    """Each kind is absent, or as frequent as it can be while the world still gets somewhere."""

    def maybe(*rates: float) -> float:
        return float(rng.choice([0.0, *rates]))

    return Faults(
        until=FAULT_SECONDS,
        buffer_deaths=maybe(0.05, 0.3),
        generator_deaths=maybe(0.1),
        generator_freezes=maybe(0.1),
        trainer_deaths=maybe(0.1),
        disk_full=maybe(0.05),
        clock_jumps=0.05,
        silent=maybe(0.03),
        bad_steps=maybe(0.1),
        delay=float(rng.choice([0.01, 0.2])),
        lost=maybe(0.1),
        doubled=maybe(0.1),
        failing=maybe(0.1),
    )
