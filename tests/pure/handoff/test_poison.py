"""The catalogue of bad inputs: each is refused with its reason, or masked, and none raises."""

import struct
import zlib
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import msgspec
import numpy as np
import pytest
import xxhash

from service.columns import select
from service.handoff.steps.tables import step_group, steps_table
from service.handoff.steps.values import Routing
from service.handoff.steps.wire import DEFLATED, PREFIX, VERSION, decode, encode
from service.handoff.validate import MIN_LOGPROB, refusal
from service.types import (
    Refusal,
    RefusalReason,
    Sender,
    Step,
    StepGroup,
    Steps,
)
from tests.pure.handoff.worlds import LIMITS, SENDER, end, episode, shared, step

R = RefusalReason
STEPS = shared(episode(np.random.default_rng(3), 4))
END = end(steps=4, reward=1.0)
GOOD = step_group(SENDER, STEPS, [END])


def changed(column: str, at: int, value: Any) -> StepGroup:
    """The good message with one number of a column changed."""
    table = GOOD.ends if column.endswith("_E") else GOOD.steps
    array = getattr(table, column).copy()
    array[at] = value
    other = replace(table, **{column: array})
    return replace(GOOD, ends=other) if column.endswith("_E") else replace(GOOD, steps=other)


def with_steps(*steps: Step) -> StepGroup:
    return step_group(SENDER, steps, [])


def with_info(info: str) -> StepGroup:
    return step_group(SENDER, STEPS, [END._replace(info=info)])


def test_the_good_message_may_enter() -> None:
    assert refusal(GOOD, LIMITS) is None
    assert isinstance(decode(encode(GOOD), LIMITS), StepGroup)


REFUSED: dict[str, tuple[Callable[[], StepGroup], RefusalReason]] = {
    "supports that do not add up": (lambda: supported([0, 1, 3], [5]), R.LENGTH_MISMATCH),
    "a support of all": (lambda: supported([0, 1, 513], list(range(100, 612))), R.TOO_LARGE),
    "a support with its token": (lambda: supported([0, 1, 3], [5, 7]), R.MALFORMED),
    "a support with a token twice": (lambda: supported([0, 1, 3], [9, 9]), R.MALFORMED),
    "a support beyond the vocabulary": (lambda: supported([0, 1, 2], [1 << 30]), R.TOKEN_RANGE),
    "a support of a prompt": (lambda: support_of_a_prompt(), R.MALFORMED),
    "nothing in it": (lambda: step_group(SENDER, [], []), R.EMPTY),
    "no sender's name": (lambda: replace(GOOD, sender=Sender("", 1, 0)), R.IDENTITY),
    "negative incarnation": (lambda: replace(GOOD, sender=Sender("g", -1, 0)), R.IDENTITY),
    "no uid": (lambda: with_steps(replace(STEPS[0], prompt_uid="")), R.IDENTITY),
    "endless uid": (lambda: with_steps(replace(STEPS[0], prompt_uid="u" * 5000)), R.TOO_LARGE),
    "endless note": (lambda: with_steps(replace(STEPS[0], note="n" * 2000)), R.TOO_LARGE),
    "endless info": (lambda: with_info(f'{{"e": {{"{"n" * 3000}": 1}}}}'), R.TOO_LARGE),
    "an info that is no JSON": (lambda: with_info('{"e": {"won": NaN}}'), R.MALFORMED),
    "an info of no numbers": (lambda: with_info('{"e": {"won": [1]}}'), R.MALFORMED),
    "info beyond the list": (lambda: changed("info_E", 0, 1), R.MALFORMED),
    "negative group_id": (lambda: changed("group_id_K", 0, -1), R.IDENTITY),
    "sample beyond the group": (lambda: changed("sample_K", 1, 8), R.IDENTITY),
    "attempt beyond the last": (lambda: changed("attempt_K", 1, 3), R.IDENTITY),
    "attempt of an end beyond the last": (lambda: changed("attempt_E", 0, 99), R.IDENTITY),
    "one trajectory under two uids": (lambda: with_steps(STEPS[0], replace(STEPS[1], prompt_uid="b")), R.IDENTITY),
    "an end under another uid": (lambda: step_group(SENDER, STEPS, [end(steps=4, uid="b")]), R.IDENTITY),
    "negative step index": (lambda: changed("index_K", 0, -1), R.STEP_ORDER),
    "step index beyond the last turn": (lambda: changed("index_K", 3, 60), R.STEP_ORDER),
    "extends itself": (lambda: changed("extends_K", 2, 2), R.PREFIX),
    "extends a later step": (lambda: changed("extends_K", 1, 3), R.PREFIX),
    "extends nothing, by a length": (lambda: changed("extends_length_K", 0, 5), R.PREFIX),
    "extends nothing, by a digest": (lambda: changed("extends_digest_K", 0, 5), R.PREFIX),
    "extends no tokens": (lambda: changed("extends_length_K", 1, 0), R.PREFIX),
    "empty response": (lambda: with_steps(step(0, [1], [])), R.EMPTY),
    "empty prompt": (lambda: with_steps(step(0, [], [1])), R.EMPTY),
    "prompt too long": (lambda: with_steps(step(0, [1] * 513, [2])), R.LENGTH_LIMIT),
    "prompt too long by what it extends": (lambda: changed("extends_length_K", 3, 600), R.LENGTH_LIMIT),
    "response too long": (lambda: with_steps(step(0, [1], [2] * 65)), R.LENGTH_LIMIT),
    "negative token id": (lambda: changed("token_ids_N", 0, -1), R.TOKEN_RANGE),
    "token id beyond the vocabulary": (lambda: changed("token_ids_N", 5, 1000), R.TOKEN_RANGE),
    "routed expert -2": (lambda: with_steps(routed(1, 1, -2)), R.TOKEN_RANGE),
    "NaN reward": (lambda: changed("reward_K", 1, np.nan), R.REWARD),
    "NaN reward of the end": (lambda: changed("reward_E", 0, np.nan), R.REWARD),
    "a reward beyond every sum": (lambda: changed("reward_K", 1, 1e308), R.REWARD),
    "routed experts without layers": (lambda: with_steps(routed(2, 0)), R.EMPTY),
    "temperature 0": (lambda: changed("temperature_K", 1, 0.0), R.TEMPERATURE),
    "infinite temperature": (lambda: changed("temperature_K", 1, np.inf), R.TEMPERATURE),
    "no log-probabilities": (lambda: with_steps(replace(STEPS[0], logprobs=None)), R.LOGPROB),
    "log-probability above 0": (lambda: changed("logprobs_N", -1, 0.5), R.LOGPROB),
    "log-probability of nothing": (lambda: changed("logprobs_N", -1, MIN_LOGPROB * 2), R.LOGPROB),
    "sampled token without a version": (lambda: changed("versions_N", -1, -1), R.VERSION),
    "observation with a version": (lambda: changed("versions_N", 0, 0), R.VERSION),
    "observation of version -2": (lambda: changed("versions_N", 0, -2), R.VERSION),
    "loss on a token that nobody sampled": (lambda: changed("loss_mask_N", 0, True), R.VERSION),
    "loss on a prompt": (lambda: prompt_with_loss(), R.MALFORMED),
    "prompt longer than the step": (lambda: changed("prompt_length_K", 0, 10_000), R.MALFORMED),
    "negative prompt length": (lambda: changed("prompt_length_K", 0, -1), R.MALFORMED),
    "uid beyond the list": (lambda: changed("uid_K", 0, 7), R.MALFORMED),
    "stop reason beyond the list": (lambda: changed("stop_reason_K", 0, 7), R.MALFORMED),
    "note beyond the list": (lambda: changed("note_K", 0, 7), R.MALFORMED),
    "stop reason of an end beyond the list": (lambda: changed("stop_reason_E", 0, -3), R.MALFORMED),
    "offsets that go back": (lambda: changed("offsets_K", 1, 10_000), R.LENGTH_MISMATCH),
    "offsets that do not begin at 0": (lambda: changed("offsets_K", 0, 1), R.LENGTH_MISMATCH),
}  # fmt: skip


def routed(layers: int, topk: int, expert: int = 0) -> Step:
    n_tokens = len(STEPS[0].prompt_ids) + len(STEPS[0].response_ids)
    return replace(STEPS[0], routed_experts=np.full((n_tokens, layers, topk), expert, np.int16))


def supported(sizes: list[int], others: list[int], token_ids: list[int] | None = None) -> StepGroup:
    """A step of three sampled tokens with these supports."""
    ids = token_ids or [5, 6, 7]
    made = step(0, [1, 2], ids)
    return with_steps(replace(made, support_size=np.array(sizes, np.uint16), support=np.array(others, np.int32)))


def test_a_good_support_may_enter() -> None:
    assert refusal(supported([0, 1, 3], [5, 9]), LIMITS) is None


def support_of_a_prompt() -> StepGroup:
    message = supported([0, 1, 1], [])
    sizes_N = message.steps.support_size_N.copy()  # type: ignore[union-attr]
    sizes_N[0] = 1
    return replace(message, steps=replace(message.steps, support_size_N=sizes_N))


def prompt_with_loss() -> StepGroup:
    versions, mask = GOOD.steps.versions_N.copy(), GOOD.steps.loss_mask_N.copy()
    versions[0], mask[0] = 0, True
    return replace(GOOD, steps=replace(GOOD.steps, versions_N=versions, loss_mask_N=mask))


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # inf - inf, when a table sums token rewards
def test_a_poisoned_message_is_refused_with_its_reason_also_after_its_way_over_the_wire(name: str) -> None:
    make, reason = REFUSED[name]
    found = refusal(make(), LIMITS)
    assert found is not None and found.reason == reason and found.path and len(str(found)) < 300, found
    again = decode(encode(make()), LIMITS)
    found = again if isinstance(again, Refusal) else refusal(again, LIMITS)
    assert found is not None and found.reason == reason, found


UNMAKEABLE: dict[str, Callable[[], object]] = {
    "fewer log-probabilities than tokens": lambda: replace(STEPS[0], logprobs=STEPS[0].logprobs[:-1]),
    "a short column": lambda: replace(GOOD.steps, sample_K=GOOD.steps.sample_K[:-1]),
    "short offsets": lambda: replace(GOOD.steps, offsets_K=GOOD.steps.offsets_K[:-1]),
}


@pytest.mark.parametrize("name", UNMAKEABLE)
def test_records_whose_parts_do_not_fit_cannot_be_made(name: str) -> None:
    with pytest.raises(ValueError, match=r"has \d+ items"):
        UNMAKEABLE[name]()


@pytest.mark.parametrize(
    ("at", "value"), [(-1, np.nan), (-1, np.inf), (-1, -np.inf), (-1, 1e-6), (0, np.nan), (0, 3.0)]
)
def test_a_log_probability_may_be_rounded_not_finite_or_of_a_token_without_loss(at: int, value: float) -> None:
    assert refusal(changed("logprobs_N", at, value), LIMITS) is None


def reframed(change: Callable[[dict[str, Any]], Any], payload: bytes | None = None) -> bytes:
    """The good message with another header, under a right checksum."""
    data = encode(GOOD)
    head_bytes = PREFIX.unpack_from(data)[3]
    head = msgspec.msgpack.decode(data[PREFIX.size : PREFIX.size + head_bytes])
    head = change(head) or head
    body = data[PREFIX.size + head_bytes :] if payload is None else payload
    return framed(head if isinstance(head, bytes) else msgspec.msgpack.encode(head), body)


def framed(head: bytes, payload: bytes, version: int = VERSION, kind: int = 1) -> bytes:
    checksum = xxhash.xxh3_64_intdigest(head + payload)
    return PREFIX.pack(b"BATN", kind, version, len(head), len(payload), checksum) + head + payload


def with_array(array: str, **changes: Any) -> bytes:
    """The good message whose header gives one array another name, type or shape."""

    def change(head: dict[str, Any]) -> None:
        head["arrays"] = [
            [changes.get("name", n), changes.get("dtype", d), changes.get("shape", s)] if n == array else [n, d, s]
            for n, d, s in head["arrays"]
        ]

    return reframed(change)


def experts_shape(*shape: int) -> Callable[[dict[str, Any]], None]:
    """One more array, of routed experts, that has this shape and no bytes."""
    return lambda head: head["arrays"].append(["routed_experts_N", "<i2", list(shape)])


def with_broken_name(head: dict[str, Any]) -> bytes:
    return msgspec.msgpack.encode(head).replace(b"generator-0", b"generator\xff0")


DEEP = b"\x91" * 100_000 + b"\xc0"

DEEPER = framed(zlib.compress(encode(GOOD)), b"", kind=DEFLATED)

PICKLE = b"\x80\x04\x95\x1c\0\0\0\0\0\0\0\x8c\x05posix\x94\x8c\x06system\x94\x93\x94\x8c\x02id\x94\x85\x94R."
"""What would run a program if it were unpickled."""

DAMAGED: dict[str, tuple[Callable[[], bytes], RefusalReason]] = {
    "no bytes": (lambda: b"", R.MALFORMED),
    "a pickle": (lambda: PICKLE, R.MALFORMED),
    "a newer format": (lambda: framed(b"\x80", b"", version=VERSION + 1), R.SCHEMA),
    "a mini-batch": (lambda: encode(GOOD)[:4] + struct.pack("<H", 2) + encode(GOOD)[6:], R.MALFORMED),
    "a byte too many": (lambda: encode(GOOD) + b"\0", R.MALFORMED),
    "a wrong checksum": (lambda: encode(GOOD)[:-1] + b"\x77", R.CHECKSUM),
    "a deflated message of no stream": (lambda: framed(b"BATN", b"", kind=DEFLATED), R.MALFORMED),
    "a deflated message cut": (lambda: framed(zlib.compress(encode(GOOD))[:-99], b"", kind=DEFLATED), R.MALFORMED),
    "a deflated message too large": (lambda: framed(zlib.compress(bytes(1 << 21)), b"", kind=DEFLATED), R.MALFORMED),
    "a message deflated twice": (lambda: framed(zlib.compress(DEEPER), b"", kind=DEFLATED), R.MALFORMED),
    "no header": (lambda: framed(b"", b""), R.SCHEMA),
    "a header that nests deeply": (lambda: framed(DEEP, b""), R.SCHEMA),
    "a declared array of 2^32 items": (lambda: framed(b"\xdd\xff\xff\xff\xff", b""), R.SCHEMA),
    "an unknown field": (lambda: reframed(lambda head: head.update(extra=1)), R.SCHEMA),
    "a name that is no UTF-8": (lambda: reframed(with_broken_name), R.SCHEMA),
    "an unknown array": (lambda: with_array("uid_K", name="evil_K"), R.SCHEMA),
    "one array twice": (lambda: with_array("sample_K", name="uid_K"), R.SCHEMA),
    "token ids as floats": (lambda: with_array("token_ids_N", dtype="<f4"), R.SCHEMA),
    "an array of arrays": (lambda: with_array("token_ids_N", shape=[1, 1]), R.SCHEMA),
    "a negative shape": (lambda: with_array("token_ids_N", shape=[-1]), R.MALFORMED),
    "a shape beyond 64 bits": (lambda: with_array("uid_K", shape=[1 << 63]), R.MALFORMED),
    "an axis of 2^62 beside an empty one": (lambda: reframed(experts_shape(1 << 62, 0, 0)), R.MALFORMED),
    "an empty axis beside one of 2^40": (lambda: reframed(experts_shape(0, 1 << 40, 1)), R.MALFORMED),
    "a header of 200,000 names": (lambda: reframed(lambda head: head.update(step_uids=[""] * 200000)), R.MALFORMED),
    "a payload too short": (lambda: reframed(lambda head: None, payload=b"\0" * 64), R.MALFORMED),
    "a payload too long": (lambda: reframed(lambda head: None, payload=encode(GOOD)[200:] + b"\0" * 4096), R.MALFORMED),
    "a column shorter than its axis": (lambda: encode_unchecked("sample_K"), R.LENGTH_MISMATCH),
    "a truth that is 2": (lambda: encode(replace(GOOD, steps=with_truths_of(2))), R.MALFORMED),
    "a column of ends shorter than its axis": (lambda: encode_unchecked("reward_E"), R.LENGTH_MISMATCH),
}  # fmt: skip


def with_truths_of(byte: int) -> Steps:
    """The good message's steps, the loss mask of whose sampled tokens is this byte."""
    mask_N = GOOD.steps.loss_mask_N
    return replace(GOOD.steps, loss_mask_N=(mask_N.astype(np.uint8) * byte).view(np.bool_))


def encode_unchecked(column: str) -> bytes:
    """The good message with the last item of a column cut off, which no table can hold."""
    table = GOOD.ends if column.endswith("_E") else GOOD.steps
    broken = object.__new__(type(table))
    for name in [field.name for field in fields(table)]:
        value = getattr(table, name)
        object.__setattr__(broken, name, value[:-1] if name == column else value)
    return encode(replace(GOOD, ends=broken) if column.endswith("_E") else replace(GOOD, steps=broken))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_bytes_are_refused_with_their_reason(name: str) -> None:
    make, reason = DAMAGED[name]
    found = decode(make(), LIMITS)
    assert isinstance(found, Refusal) and found.reason == reason, found
    assert len(str(found)) < 300


def test_a_message_of_a_million_steps_is_refused_by_its_size() -> None:
    table = select(steps_table([step(0, [1], [2])]), np.zeros(20_000, np.int64))
    found = decode(encode(StepGroup(SENDER, table, GOOD.ends)), LIMITS)
    assert isinstance(found, Refusal) and found.reason == R.TOO_LARGE


@pytest.mark.parametrize(
    ("layers", "topk", "expert", "reason"),
    [
        (4, 2, 5, None), (3, 2, 5, None), (3, 2, -1, None), (2, 2, 0, R.LENGTH_MISMATCH), (3, 3, 0, R.LENGTH_MISMATCH),
        (3, 2, 6, R.TOKEN_RANGE), (3, 2, 32_767, R.TOKEN_RANGE),
    ],
)  # fmt: skip
def test_routed_experts_that_the_model_has_not_are_refused(
    layers: int, topk: int, expert: int, reason: RefusalReason | None
) -> None:
    step = routed(layers, topk)
    assert step.routed_experts is not None
    step.routed_experts[-1] = expert
    limits = replace(LIMITS, routing=Routing((4, 3), 2, 6))
    found = refusal(with_steps(step), limits)
    assert (None if found is None else found.reason) is reason
    if expert < 255:
        found = refusal(with_steps(replace(step, routed_experts=step.routed_experts.astype(np.uint8))), limits)
        assert (None if found is None else found.reason) is reason


def test_experts_are_recorded_as_bytes_where_256_numbers_suffice() -> None:
    kinds = {Routing((3,), topk, experts).dtype for topk, experts in ((1, 255), (2, 256), (8, 128))}
    assert kinds == {np.dtype(np.uint8)}
    assert {Routing((3,), topk, experts).dtype for topk, experts in ((1, 256), (2, 257))} == {np.dtype(np.int16)}
    assert Routing((48, 46), 8, 128).token_bytes == 48 * 8 and Routing((4,), 2, 512).token_bytes == 4 * 2 * 2


def test_a_model_without_experts_takes_no_routed_ones() -> None:
    found = refusal(with_steps(routed(2, 2)), replace(LIMITS, routing=Routing((), 0, 0)))
    assert found is not None and found.reason is R.LENGTH_MISMATCH
    assert refusal(GOOD, replace(LIMITS, routing=Routing((), 0, 0))) is None
