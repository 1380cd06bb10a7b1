"""The door: which step groups may enter the buffer.

What follows from bad data, exactly:

- masked, and counted as such: a log-probability that is not finite on a token the policy sampled; the token carries no
  loss, the rest of the step does. On tokens that carry no loss, log-probabilities are not looked at.
- the trajectory is refused (it may be tried again): more than max(1, 1 %) of its sampled tokens have such a
  log-probability, or its steps do not make a whole: a gap, a step after the end, a reference that does not hold.
- the message is refused: everything else below. Of those, a reward that is not a finite number refuses the group,
  because every sibling's baseline would be wrong without it.

Rules go from cheap to dear, and the first that fails names itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.config.tree import Config
from service.handoff.prefix import History, PrefixError, in_order, total_lengths
from service.handoff.tables import trajectories
from service.types import NO_VERSION, ROUTE_NATIVELY, Ends, Refusal, RefusalReason, StepGroup, Steps

MAX_NAME_LENGTH = 1024
"""Characters of a generator's name, a prompt's uid or a stop reason, at most."""

LOGPROB_TOLERANCE = 1e-4
"""How far above 0 rounding may take a log-probability."""

MAX_SHARE_NOT_FINITE = 0.01
"""Of a trajectory's sampled tokens, the share whose log-probability may be missing."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a message may contain, at most."""

    vocab_size: int
    max_input_length: int
    max_generate_length: int
    max_turns: int
    n_samples_per_prompt: int
    max_attempts: int
    max_group_bytes: int
    needs_logprobs: bool = True

    @staticmethod
    def of(config: Config, vocab_size: int) -> Limits:
        """The limits that a configuration implies."""
        return Limits(
            vocab_size=vocab_size,
            max_input_length=config.generator.max_input_length,
            max_generate_length=config.generator.max_generate_length,
            max_turns=config.env.max_turns,
            n_samples_per_prompt=config.algorithm.n_samples_per_prompt,
            max_attempts=config.buffer.max_attempts,
            max_group_bytes=config.buffer.max_group_bytes,
        )


def refusal(group: StepGroup, limits: Limits) -> Refusal | None:
    """Why a message is refused, by what stands in it alone; None if it may enter."""
    if not len(group.steps) and not len(group.ends):
        return Refusal(RefusalReason.EMPTY, "message")
    rules: tuple[Callable[[StepGroup, Limits], Refusal | None], ...] = (
        table_fault_of, _sender, _identity, _order, _lengths, _token_ids, _rewards, _logprobs, _versions, _conflicts,
    )  # fmt: skip
    return next((found for rule in rules if (found := rule(group, limits)) is not None), None)


def trajectory_refusal(steps: Steps, ends: Ends) -> Refusal | None:
    """Why a trajectory is refused, once its end and as many steps as that names are there; None if it is whole."""
    if len(ends) != 1:
        return Refusal(RefusalReason.STEP_ORDER, "ends", len(ends))
    try:
        steps, _ = in_order(steps)
    except ValueError as error:
        return Refusal(RefusalReason.CONFLICT, str(error))
    if (gap := _first(steps.index_K != np.arange(len(steps)))) is not None or len(steps) != ends.n_steps_E[0]:
        return Refusal(RefusalReason.STEP_ORDER, "index_K", len(steps) if gap is None else gap)
    history = History(steps)
    try:
        for k in range(len(steps)):
            history.add(k)
    except PrefixError as error:
        return Refusal(RefusalReason.PREFIX, str(error))
    sampled_N = steps.loss_mask_N & np.repeat(steps.has_logprobs_K, np.diff(steps.offsets_K))
    bad = int(np.count_nonzero(sampled_N & ~np.isfinite(steps.logprobs_N)))
    if bad > max(1, MAX_SHARE_NOT_FINITE * np.count_nonzero(sampled_N)):
        return Refusal(RefusalReason.LOGPROB, "logprobs_N", bad)
    return None


def table_fault_of(group: StepGroup, limits: Limits) -> Refusal | None:
    """Why a group's tables are no tables."""
    return table_fault(group)


def table_fault(group: StepGroup) -> Refusal | None:
    """Why columns do not fit together: lengths, offsets, indices of strings."""
    steps, ends = group.steps, group.ends
    items, tokens = len(steps.ordinal_K), len(steps.token_ids_N)
    for table, suffix, length in ((steps, "_K", items), (steps, "_N", tokens), (ends, "_E", len(ends.ordinal_E))):
        for name in table.__slots__:
            column: NDArray[Any] | None = getattr(table, name)
            if name.endswith(suffix) and name != "offsets_K" and column is not None and len(column) != length:
                return Refusal(RefusalReason.LENGTH_MISMATCH, name, len(column))
    offsets = steps.offsets_K
    if len(offsets) != items + 1 or offsets[0] != 0 or offsets[-1] != tokens:
        return Refusal(RefusalReason.LENGTH_MISMATCH, "offsets_K", len(offsets))
    own_K = np.diff(offsets)
    codes = (
        (steps.uid_K, "uid_K", len(steps.uids)), (steps.stop_reason_K, "stop_reason_K", len(steps.stop_reasons)),
        (ends.uid_E, "uid_E", len(ends.uids)), (ends.stop_reason_E, "stop_reason_E", len(ends.stop_reasons)),
    )  # fmt: skip
    faults: Iterator[tuple[NDArray[Any], str]] = iter(
        [(own_K < 0, "offsets_K"), ((steps.prompt_length_K < 0) | (steps.prompt_length_K > own_K), "prompt_length_K")]
        + [((code < 0) | (code >= count), name) for code, name, count in codes]
    )
    return _first_fault(faults, RefusalReason.MALFORMED)


def _sender(group: StepGroup, limits: Limits) -> Refusal | None:
    generator, epoch, sequence = group.sender
    if not 0 < len(generator) <= MAX_NAME_LENGTH or epoch < 0 or sequence < 0:
        return Refusal(RefusalReason.IDENTITY, "sender")
    for table in (group.steps, group.ends):
        for name in (*table.uids, *table.stop_reasons):
            if len(name) > MAX_NAME_LENGTH:
                return Refusal(RefusalReason.TOO_LARGE, "uids", len(name))
        if "" in table.uids:
            return Refusal(RefusalReason.IDENTITY, "uids")
    return None


def _identity(group: StepGroup, limits: Limits) -> Refusal | None:
    steps, ends = group.steps, group.ends
    faults = [
        (fault, name)
        for ordinal_X, sample_X, attempt_X, x in (
            (steps.ordinal_K, steps.sample_K, steps.attempt_K, "K"),
            (ends.ordinal_E, ends.sample_E, ends.attempt_E, "E"),
        )
        for fault, name in (
            (ordinal_X < 0, f"ordinal_{x}"),
            ((sample_X < 0) | (sample_X >= limits.n_samples_per_prompt), f"sample_{x}"),
            ((attempt_X < 0) | (attempt_X >= limits.max_attempts), f"attempt_{x}"),
        )
    ]
    return _first_fault(iter(faults), RefusalReason.IDENTITY) or _one_uid_per_ordinal(steps, ends)


def _one_uid_per_ordinal(steps: Steps, ends: Ends) -> Refusal | None:
    uid_of: dict[int, str] = {}
    pairs = {(int(o), steps.uids[u]) for o, u in zip(steps.ordinal_K, steps.uid_K, strict=True)}
    pairs |= {(int(o), ends.uids[u]) for o, u in zip(ends.ordinal_E, ends.uid_E, strict=True)}
    for ordinal, uid in pairs:
        if uid_of.setdefault(ordinal, uid) != uid:
            return Refusal(RefusalReason.IDENTITY, f"uids of ordinal {ordinal}")
    return None


def _order(group: StepGroup, limits: Limits) -> Refusal | None:
    steps, ends = group.steps, group.ends
    full_K = steps.extends_K == -1
    half_K = full_K & ((steps.extends_length_K != 0) | (steps.extends_digest_K != 0))
    faults = (
        ((steps.index_K < 0) | (steps.index_K >= limits.max_turns), "index_K", RefusalReason.STEP_ORDER),
        ((ends.n_steps_E < 0) | (ends.n_steps_E > limits.max_turns), "n_steps_E", RefusalReason.STEP_ORDER),
        ((steps.extends_K < -1) | (steps.extends_K >= steps.index_K) & ~full_K, "extends_K", RefusalReason.PREFIX),
        (half_K | ~full_K & (steps.extends_length_K < 1), "extends_length_K", RefusalReason.PREFIX),
    )
    for fault_X, name, reason in faults:
        if (found := _first_fault(iter([(fault_X, name)]), reason)) is not None:
            return found
    return None


def _lengths(group: StepGroup, limits: Limits) -> Refusal | None:
    steps = group.steps
    response_K = np.diff(steps.offsets_K) - steps.prompt_length_K
    prompt_K = total_lengths(steps) - response_K
    if (k := _first((response_K == 0) | (prompt_K == 0))) is not None:
        return Refusal(RefusalReason.EMPTY, f"step {k}")
    if (k := _first(prompt_K > limits.max_input_length)) is not None:
        return Refusal(RefusalReason.LENGTH_LIMIT, "prompt_length_K", int(prompt_K[k]))
    if (k := _first(response_K > limits.max_generate_length)) is not None:
        return Refusal(RefusalReason.LENGTH_LIMIT, "response_length_K", int(response_K[k]))
    return None


def _token_ids(group: StepGroup, limits: Limits) -> Refusal | None:
    ids_N, experts_N = group.steps.token_ids_N, group.steps.routed_experts_N
    if len(ids_N) and (ids_N.min() < 0 or ids_N.max() >= limits.vocab_size):
        n = int(((ids_N < 0) | (ids_N >= limits.vocab_size)).argmax())
        return Refusal(RefusalReason.TOKEN_RANGE, f"token_ids_N[{n}]", int(ids_N[n]))
    if experts_N is not None and experts_N.size and experts_N.min() < ROUTE_NATIVELY:
        return Refusal(RefusalReason.TOKEN_RANGE, "routed_experts_N", int(experts_N.min()))
    return None


def _rewards(group: StepGroup, limits: Limits) -> Refusal | None:
    columns: list[tuple[NDArray[Any], str]] = [(group.steps.reward_K, "reward_K"), (group.ends.reward_E, "reward_E")]
    if group.steps.token_rewards_N is not None:
        columns.append((group.steps.token_rewards_N, "token_rewards_N"))
    found = _first_fault(((~np.isfinite(column), name) for column, name in columns), RefusalReason.REWARD)
    temperature_K = group.steps.temperature_K
    return found or _first_fault(
        iter([(~np.isfinite(temperature_K) | (temperature_K <= 0), "temperature_K")]), RefusalReason.TEMPERATURE
    )


def _logprobs(group: StepGroup, limits: Limits) -> Refusal | None:
    steps = group.steps
    if limits.needs_logprobs and (k := _first(~steps.has_logprobs_K)) is not None:
        return Refusal(RefusalReason.LOGPROB, "has_logprobs_K", k)
    positive_N = steps.loss_mask_N & (steps.logprobs_N > LOGPROB_TOLERANCE) & (steps.logprobs_N < np.inf)
    return _first_fault(iter([(positive_N, "logprobs_N")]), RefusalReason.LOGPROB)


def _versions(group: StepGroup, limits: Limits) -> Refusal | None:
    steps = group.steps
    if (n := _first(steps.loss_mask_N != (steps.versions_N >= 0))) is not None:
        return Refusal(RefusalReason.VERSION, f"versions_N[{n}]", int(steps.versions_N[n]))
    if (n := _first(steps.versions_N < NO_VERSION)) is not None:
        return Refusal(RefusalReason.VERSION, f"versions_N[{n}]", int(steps.versions_N[n]))
    prompt_end_K = steps.offsets_K[:-1] + steps.prompt_length_K
    sampled_before_N = np.concatenate(([0], np.cumsum(steps.loss_mask_N)))
    in_prompt_K = sampled_before_N[prompt_end_K] > sampled_before_N[steps.offsets_K[:-1]]
    return _first_fault(iter([(in_prompt_K, "loss_mask_N")]), RefusalReason.MALFORMED)


def _conflicts(group: StepGroup, limits: Limits) -> Refusal | None:
    steps, ends = group.steps, group.ends
    try:
        in_order(steps)
    except ValueError as error:
        return Refusal(RefusalReason.CONFLICT, str(error)[:200])
    if not len(ends):
        return None
    number_X, first_G = trajectories(
        np.concatenate((ends.ordinal_E, steps.ordinal_K)),
        np.concatenate((ends.sample_E, steps.sample_K)),
        np.concatenate((ends.attempt_E, steps.attempt_K)),
    )
    for e, g in enumerate(number_X[: len(ends)].tolist()):
        first = int(first_G[g])
        if first != e and any(getattr(ends, c)[e] != getattr(ends, c)[first] for c in ("n_steps_E", "reward_E")):
            return Refusal(RefusalReason.CONFLICT, f"ends[{e}]")
    n_steps_G = np.full(len(first_G), np.iinfo(np.int32).max)
    n_steps_G[number_X[: len(ends)]] = ends.n_steps_E
    after_K = steps.index_K >= n_steps_G[number_X[len(ends) :]]
    return _first_fault(iter([(after_K, "index_K")]), RefusalReason.STEP_ORDER)


def _first(fault_X: NDArray[np.bool_]) -> int | None:
    return int(fault_X.argmax()) if fault_X.any() else None


def _first_fault(faults: Iterator[tuple[NDArray[Any], str]], reason: RefusalReason) -> Refusal | None:
    for fault_X, name in faults:
        if (x := _first(fault_X)) is not None:
            return Refusal(reason, f"{name}[{x}]", x)
    return None
