from __future__ import annotations

from dataclasses import replace

import numpy as np

from service.handoff.tables import end_objects, step_group
from service.handoff.wire import decode, encode
from service.types import Refusal, RefusalReason, StepGroup, TrajectoryId
from tests.pure.handoff.worlds import LIMITS, SENDER, end, episode, shared

STEPS = episode(np.random.default_rng(0), 4)
GROUP = step_group(SENDER, STEPS, [end(steps=4, reward=0.1)])


def test_a_step_group_survives_its_bytes() -> None:
    again = decode(encode(GROUP), LIMITS)
    assert isinstance(again, StepGroup) and again.sender == SENDER
    for name in ("token_ids_N", "logprobs_N", "loss_mask_N", "versions_N", "offsets_K", "index_K", "extends_digest_K"):
        assert (getattr(again.steps, name) == getattr(GROUP.steps, name)).all()
    assert end_objects(again.ends) == end_objects(GROUP.ends)
    assert again.steps.token_rewards_N is None


def test_token_rewards_and_routed_experts_survive_their_bytes() -> None:
    rich = [
        replace(
            s,
            reward=np.full(len(s.response_ids), 0.5, np.float32),
            routed_experts=np.ones((len(s.prompt_ids) + len(s.response_ids), 2, 4), np.int16),
        )
        for s in shared(STEPS)
    ]
    again = decode(encode(step_group(SENDER, rich, [])), LIMITS)
    assert isinstance(again, StepGroup)
    assert again.steps.routed_experts_N is not None and again.steps.routed_experts_N.shape[1:] == (2, 4)
    assert again.steps.token_rewards_N is not None and again.steps.reward_K[0] == 0.5 * len(STEPS[0].response_ids)


def test_arrays_lie_at_multiples_of_64_bytes() -> None:
    again = decode(encode(GROUP), LIMITS)
    assert isinstance(again, StepGroup)
    starts = [getattr(again.steps, n).__array_interface__["data"][0] for n in ("token_ids_N", "logprobs_N")]
    assert (starts[1] - starts[0]) % 64 == 0


def test_a_flipped_bit_is_noticed_wherever_it_is() -> None:
    data = encode(GROUP)
    rng = np.random.default_rng(0)
    places = [*range(40), *rng.integers(0, len(data), 300).tolist()]
    for place in places:
        damaged = bytearray(data)
        damaged[place] ^= 1 << int(rng.integers(8))
        assert isinstance(decode(bytes(damaged), LIMITS), Refusal), place


def test_every_cut_message_is_refused() -> None:
    data = encode(GROUP)
    for length in range(0, len(data), 7):
        assert isinstance(decode(data[:length], LIMITS), Refusal)


def test_a_message_over_the_bound_is_refused_before_it_is_read() -> None:
    found = decode(encode(GROUP), replace(LIMITS, max_group_bytes=100))
    assert isinstance(found, Refusal) and found.reason == RefusalReason.TOO_LARGE


def test_ten_thousand_random_byte_strings_are_refused() -> None:
    rng = np.random.default_rng(0)
    start = encode(GROUP)[:28]
    for number in range(10_000):
        data = rng.bytes(int(rng.integers(0, 400)))
        if number % 2:
            data = start + data
        assert isinstance(decode(data, LIMITS), Refusal)


def test_an_empty_group_survives_its_bytes() -> None:
    again = decode(encode(step_group(SENDER, [], [end(TrajectoryId(0, 1), steps=0)])), LIMITS)
    assert isinstance(again, StepGroup) and len(again.steps) == 0 and len(again.ends) == 1
