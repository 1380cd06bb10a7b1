from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
import xxhash

from service.handoff.prefixes.merge import check_whole
from service.handoff.steps.tables import end_objects, step_group
from service.handoff.steps.wire import MAX_HEADER_BYTES, PREFIX, VERSION, decode, encode
from service.handoff.validate import refusal
from service.types import StepGroup, TrajectoryId
from tests.pure.handoff.worlds import LIMITS, SENDER, end, episode, shared

STEPS = episode(np.random.default_rng(0), 4)
GROUP = step_group(SENDER, STEPS, [end(steps=4, reward=0.1)])


def test_a_step_group_survives_its_bytes() -> None:
    again = decode(encode(GROUP), LIMITS)
    assert isinstance(again, StepGroup) and again.sender == SENDER
    for name in ("token_ids_N", "logprobs_N", "loss_mask_N", "versions_N", "offsets_K", "index_K", "extends_digest_K"):
        assert (getattr(again.steps, name) == getattr(GROUP.steps, name)).all()
    assert end_objects(again.ends) == end_objects(GROUP.ends)
    assert again.steps.routed_experts_N is None


@pytest.mark.parametrize("dtype", [np.int16, np.uint8])
def test_routed_experts_survive_their_bytes(dtype: type[np.generic]) -> None:
    rich = [
        replace(
            s,
            routed_experts=np.ones((len(s.prompt_ids) + len(s.response_ids), 2, 4), dtype),
        )
        for s in shared(STEPS)
    ]
    again = decode(encode(step_group(SENDER, rich, [])), LIMITS)
    assert isinstance(again, StepGroup)
    assert again.steps.routed_experts_N is not None and again.steps.routed_experts_N.shape[1:] == (2, 4)
    assert again.steps.routed_experts_N.dtype == dtype


def test_a_header_that_no_reader_would_take_is_not_written() -> None:
    ends = [end(TrajectoryId(group_id, 0), uid=f"{group_id:0500}") for group_id in range(2000)]
    assert isinstance(decode(encode(step_group(SENDER, [], ends)), replace(LIMITS, max_group_bytes=1 << 24)), StepGroup)
    more = [end(TrajectoryId(group_id, 0), uid=f"{group_id:0500}") for group_id in range(3000)]
    with pytest.raises(ValueError, match=f"MAX_HEADER_BYTES is {MAX_HEADER_BYTES}: send its 3002 uids"):
        encode(step_group(SENDER, [], more))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # sums of numbers that are none
def test_damage_under_a_right_checksum_never_raises() -> None:
    data = encode(GROUP)
    head_bytes = PREFIX.unpack_from(data)[3]
    rng = np.random.default_rng(1)
    accepted = 0
    for number in range(4_000):
        body = bytearray(data[PREFIX.size :])
        end_of_mischief = head_bytes if number % 2 else len(body)
        for _ in range(int(rng.integers(1, 4))):
            body[int(rng.integers(end_of_mischief))] = int(rng.choice([0, 1, 0x7F, 0x80, 0xFF, int(rng.integers(256))]))
        prefix = PREFIX.pack(
            b"BATN", 1, VERSION, head_bytes, len(body) - head_bytes, xxhash.xxh3_64_intdigest(bytes(body))
        )
        found = decode(prefix + bytes(body), LIMITS)
        if isinstance(found, StepGroup) and refusal(found, LIMITS) is None:
            accepted += 1
            with suppress(ValueError):
                check_whole(found.steps)
    assert accepted > 100
