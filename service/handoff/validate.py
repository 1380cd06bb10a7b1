"""Validation: which step groups the buffer accepts, judged by the message alone.

A sampled token whose log-probability is not finite is masked and counted. The whole message is refused if it breaks a
rule below (cheap rules come first), or a rule that compares it with earlier messages (`ledger.accept`). If a refused
message is about one trajectory only, that trajectory restarts (`attempts`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.columns import columns_of, lengths_of, nested_offsets, widened
from service.handoff.group_bytes import NAME_BYTES, NOTE_BYTES, TRANSCRIPT_BYTES
from service.handoff.steps.info import is_info
from service.handoff.steps.values import MAX_REWARD, ROLES, Limits
from service.types import MAX_SUPPORT, NO_VERSION, ROUTE_NATIVELY, Bools, Float64s, Refusal, RefusalReason, StepGroup

MAX_NAME_LENGTH = 1024
"""Maximum characters of a generator's name, a prompt's uid or a stop reason."""

MAX_GROUP_ID = 1 << 53
"""Every group_id is below this number, so that a JSON number holds the group_id exactly."""

TEMPERATURES = (1e-6, 1e6)

LOGPROB_TOLERANCE = 1e-4
"""Largest accepted log-probability: rounding may move it above 0."""
MIN_LOGPROB = -1e7
"""Smallest accepted log-probability of a sampled token: a logit difference of -10 divided by the lowest temperature."""


def refusal(group: StepGroup, limits: Limits) -> Refusal | None:
    """Why a message is refused, judged by the message alone; None if the message breaks no rule."""
    if not len(group.steps) and not len(group.ends):
        return Refusal(RefusalReason.EMPTY, "message")
    return next((found for rule in _RULES if (found := rule(group, limits)) is not None), None)


def _table(group: StepGroup, limits: Limits) -> Refusal | None:
    steps, ends = group.steps, group.ends
    for name, offsets_X, column in (
        ("offsets_K", steps.offsets_K, steps.token_ids_N),
        ("offsets_E", ends.offsets_E, ends.transcript_N),
        ("step_offsets_E", ends.step_offsets_E, ends.role_S),
    ):
        if offsets_X[0] != 0 or offsets_X[-1] != len(column) or lengths_of(offsets_X).min(initial=0) < 0:
            return Refusal(RefusalReason.LENGTH_MISMATCH, name, len(column))
    return _first_outside(
        RefusalReason.MALFORMED,
        ("prompt_length_K", steps.prompt_length_K, 0, lengths_of(steps.offsets_K) + 1),
        ("uid_K", steps.uid_K, 0, len(steps.uids)),
        ("stop_reason_K", steps.stop_reason_K, 0, len(steps.stop_reasons)),
        ("note_K", steps.note_K, 0, len(steps.notes)),
        ("uid_E", ends.uid_E, 0, len(ends.uids)),
        ("stop_reason_E", ends.stop_reason_E, 0, len(ends.stop_reasons)),
        ("info_E", ends.info_E, 0, len(ends.infos)),
    )


def _sender(group: StepGroup, limits: Limits) -> Refusal | None:
    generator, incarnation, sequence = group.sender
    if not 0 < len(generator) <= MAX_NAME_LENGTH or incarnation < 0 or sequence < 0:
        return Refusal(RefusalReason.IDENTITY, "sender")
    if (longest := max((len(note.encode()) for note in group.steps.notes), default=0)) > NOTE_BYTES:
        return Refusal(RefusalReason.TOO_LARGE, "notes", longest)
    for table in (group.steps, group.ends):
        names = [getattr(table, field) for field, _ in columns_of(type(table)).names]
        if "" in table.uids:
            return Refusal(RefusalReason.IDENTITY, "uids")
        if (longest := max((len(name) for of in names for name in of), default=0)) > MAX_NAME_LENGTH:
            return Refusal(RefusalReason.TOO_LARGE, "uids", longest)
        if (count := max(map(len, names))) > len(table):
            return Refusal(RefusalReason.MALFORMED, "uids", count)
        longest = sum(max((len(name.encode()) for name in of), default=0) for of in names)
        if longest + len(generator.encode()) > NAME_BYTES:
            return Refusal(RefusalReason.TOO_LARGE, "uids", longest)
    return None


def _identity(group: StepGroup, limits: Limits) -> Refusal | None:
    pairs: set[tuple[int, str]] = set()
    highest = {"group_id": MAX_GROUP_ID, "sample": limits.n_samples_per_prompt, "attempt": limits.max_attempts}
    for table, axis in ((group.steps, "K"), (group.ends, "E")):
        ranges = [(f"{name}_{axis}", getattr(table, f"{name}_{axis}"), 0, high) for name, high in highest.items()]
        if (found := _first_outside(RefusalReason.IDENTITY, *ranges)) is not None:
            return found
        uids = map(table.uids.__getitem__, getattr(table, f"uid_{axis}").tolist())
        pairs.update(zip(getattr(table, f"group_id_{axis}").tolist(), uids, strict=True))
    if len(dict(pairs)) < len(pairs):
        return Refusal(RefusalReason.IDENTITY, "one group_id under two uids")
    return None


def _order(group: StepGroup, limits: Limits) -> Refusal | None:
    steps, turns = group.steps, limits.max_turns
    full_K, length_K = steps.extends_K < 0, steps.extends_length_K
    wrong_K = np.where(full_K, (length_K != 0) | (steps.extends_digest_K != 0), length_K < 1)
    return (
        _first_outside(RefusalReason.STEP_ORDER, ("index_K", steps.index_K, 0, turns))
        or _first_outside(RefusalReason.STEP_ORDER, ("n_steps_E", group.ends.n_steps_E, 0, turns + 1))
        or _first_outside(RefusalReason.PREFIX, ("extends_K", steps.extends_K, -1, steps.index_K))
        or _first(RefusalReason.PREFIX, "extends_length_K", length_K, wrong_K)
    )


def _said(group: StepGroup, limits: Limits) -> Refusal | None:
    ends = group.ends
    said_E, transcript_E = lengths_of(ends.step_offsets_E), lengths_of(ends.offsets_E)
    if not all(map(is_info, ends.infos)):
        return Refusal(RefusalReason.MALFORMED, "infos")
    wrong_E = (said_E != 0) & (said_E != ends.n_steps_E)
    return (
        _first(RefusalReason.LENGTH_MISMATCH, "step_offsets_E", said_E, wrong_E)
        or _first(RefusalReason.TOO_LARGE, "transcript_N", transcript_E, transcript_E > TRANSCRIPT_BYTES)
        or _first_outside(RefusalReason.MALFORMED, ("role_S", ends.role_S, 0, len(ROLES) + limits.n_named_roles))
        or _first(RefusalReason.REWARD, "later_reward_S", ends.later_reward_S, _beyond(ends.later_reward_S))
    )


def _lengths(group: StepGroup, limits: Limits) -> Refusal | None:
    steps = group.steps
    response_K = lengths_of(steps.offsets_K) - steps.prompt_length_K
    prompt_K = steps.extends_length_K.astype(np.int64) + steps.prompt_length_K  # a full prompt extends 0 tokens
    any_length = np.iinfo(np.int64).max
    return _first_outside(
        RefusalReason.EMPTY, ("response_length_K", response_K, 1, any_length), ("prompt_K", prompt_K, 1, any_length)
    ) or _first_outside(
        RefusalReason.LENGTH_LIMIT,
        ("prompt_length_K", prompt_K, 0, limits.max_input_length + 1),
        ("response_length_K", response_K, 0, limits.max_generate_length + 1),
    )


def _token_ids(group: StepGroup, limits: Limits) -> Refusal | None:
    experts_N, routing = group.steps.routed_experts_N, limits.routing
    if experts_N is not None and 0 in experts_N.shape[1:]:
        return Refusal(RefusalReason.EMPTY, "routed_experts_N")
    if experts_N is not None and experts_N.min(initial=0) < ROUTE_NATIVELY:
        return Refusal(RefusalReason.TOKEN_RANGE, "routed_experts_N", int(experts_N.min()))
    if experts_N is not None and routing is not None:  # the trainer can only replay experts that the model has
        layers, topk = experts_N.shape[1:]
        if layers not in routing.layers or topk != routing.topk:
            return Refusal(RefusalReason.LENGTH_MISMATCH, f"routed_experts_N: {layers} layers, {topk} experts a token")
        if (largest := int(widened(experts_N).max(initial=ROUTE_NATIVELY))) >= routing.experts:
            return Refusal(RefusalReason.TOKEN_RANGE, "routed_experts_N", largest)
    return _first_outside(RefusalReason.TOKEN_RANGE, ("token_ids_N", group.steps.token_ids_N, 0, limits.vocab_size))


def _supports(group: StepGroup, limits: Limits) -> Refusal | None:
    sizes_N, support_U = group.steps.support_size_N, group.steps.support_U
    if sizes_N is None and support_U is None:
        return None
    if sizes_N is None or support_U is None:
        return Refusal(RefusalReason.LENGTH_MISMATCH, "support_U")
    if (largest := int(sizes_N.max(initial=0))) > MAX_SUPPORT:
        return Refusal(RefusalReason.TOO_LARGE, "support_size_N", largest)
    at_N = nested_offsets(sizes_N)
    if at_N[-1] != len(support_U):
        return Refusal(RefusalReason.LENGTH_MISMATCH, "support_U", len(support_U))
    token_U = np.repeat(np.arange(len(sizes_N)), lengths_of(at_N))
    wrong_U = support_U == group.steps.token_ids_N[token_U]
    wrong_U[1:] |= (support_U[1:] <= support_U[:-1]) & (token_U[1:] == token_U[:-1])
    return (
        _first(RefusalReason.MALFORMED, "support_size_N", sizes_N, (sizes_N > 0) & ~group.steps.loss_mask_N)
        or _first_outside(RefusalReason.TOKEN_RANGE, ("support_U", support_U, 0, limits.vocab_size))
        or _first(RefusalReason.MALFORMED, "support_U", support_U, wrong_U)
    )


def _numbers(group: StepGroup, limits: Limits) -> Refusal | None:
    steps, ends = group.steps, group.ends
    coldest, hottest = TEMPERATURES
    fine_K = (steps.temperature_K >= coldest) & (steps.temperature_K <= hottest)
    return (
        _first(RefusalReason.REWARD, "reward_K", steps.reward_K, _beyond(steps.reward_K))
        or _first(RefusalReason.REWARD, "reward_E", ends.reward_E, _beyond(ends.reward_E))
        or _first(RefusalReason.TEMPERATURE, "temperature_K", steps.temperature_K, ~fine_K)
    )


def _logprobs(group: StepGroup, limits: Limits) -> Refusal | None:
    steps = group.steps
    if not steps.has_logprobs_K.all():
        return Refusal(RefusalReason.LOGPROB, f"has_logprobs_K[{steps.has_logprobs_K.argmin()}]")
    wrong_N = (steps.logprobs_N > LOGPROB_TOLERANCE) | (steps.logprobs_N < MIN_LOGPROB)
    if wrong_N.any():
        wrong_N &= steps.loss_mask_N & np.isfinite(steps.logprobs_N)
    return _first(RefusalReason.LOGPROB, "logprobs_N", steps.logprobs_N, wrong_N)


def _versions(group: StepGroup, limits: Limits) -> Refusal | None:
    steps = group.steps
    wrong_N = (steps.loss_mask_N != (steps.versions_N >= 0)) | (steps.versions_N < NO_VERSION)
    if (wrong := _first(RefusalReason.VERSION, "versions_N", steps.versions_N, wrong_N)) is not None:
        return wrong
    if len(steps):
        parts = np.stack((steps.offsets_K[:-1], steps.offsets_K[:-1] + steps.prompt_length_K), axis=1).reshape(-1)
        sampled_K = np.logical_or.reduceat(steps.loss_mask_N, parts)[::2] & (steps.prompt_length_K > 0)
        if sampled_K.any():
            return Refusal(RefusalReason.MALFORMED, f"loss_mask_N: prompt of step {int(sampled_K.argmax())}")
    return None


_RULES: tuple[Callable[[StepGroup, Limits], Refusal | None], ...] = (
    _table, _sender, _identity, _order, _said, _lengths, _token_ids, _supports, _numbers, _logprobs, _versions,
)  # fmt: skip


def _beyond(reward_X: Float64s) -> Bools:
    return ~(np.abs(reward_X) <= MAX_REWARD)  # True for NaN


def _first_outside(reason: RefusalReason, *ranges: tuple[str, NDArray[Any], int, Any]) -> Refusal | None:
    """The refusal of the first integer outside its column's range [low, high); None if all are inside."""
    for name, column_X, low, high in ranges:
        above_X = (column_X if low == 0 else column_X - low).view(f"u{column_X.itemsize}")  # huge if below low
        if not isinstance(high, np.ndarray) and np.maximum.reduce(above_X, initial=0) < high - low:
            continue
        if (wrong := _first(reason, name, column_X, above_X >= high - low)) is not None:
            return wrong
    return None


def _first(reason: RefusalReason, name: str, column_X: NDArray[Any], wrong_X: Bools) -> Refusal | None:
    if not wrong_X.any():
        return None
    x = int(wrong_X.argmax())
    return Refusal(reason, f"{name}[{x}]", float(column_X[x]))
