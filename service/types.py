"""The data that flows: steps -> trajectories -> rows -> mini-batches.

Axis letters, here and everywhere: `P` prompts, `G` trajectories, `K` steps, `E` trajectory ends, `R` rows,
`T` tokens of one step or row, `N` packed tokens. An offsets array of an axis `X` has `X + 1` entries.

A table of steps or rows is columnar: one array a field, and every per-token array shares one token axis.
Item `k` owns tokens `offsets[k]:offsets[k+1]`, its prompt part first, its response part after it:

    offsets_K      [0               5       9]
    token_ids_N    [10 20 30 | 40 50 60 70 | 80 90]      step 0: prompt 10 20 30, response 40 50
    prompt_length_K [3               2]                  step 1: extends step 0 by 60 70, response 80 90
    loss_mask_N    [ 0  0  0    1  1  0  0    1  1]      (prompt tokens: mask 0, log-probability 0, no version)
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Int16s = NDArray[np.int16]
Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Uint64s = NDArray[np.uint64]
Float32s = NDArray[np.float32]
Float64s = NDArray[np.float64]
Bools = NDArray[np.bool_]

NO_VERSION = -1
"""The version of a token that no policy sampled: prompt, observation, appended end."""

ROUTE_NATIVELY = -1
"""The routed expert of a token whose routing nobody recorded."""


class PolicyVersion(NamedTuple):
    """Which weights sampled a token: (trainer incarnation, optimizer steps); ordered, and packable into one int64."""

    incarnation: int
    step: int

    def pack(self) -> int:
        """One int64: `incarnation << 32 | step`, in the same order as the pair."""
        return self.incarnation << 32 | self.step

    @staticmethod
    def unpack(packed: int) -> PolicyVersion:
        """The pair behind a packed version."""
        return PolicyVersion(packed >> 32, packed & 0xFFFFFFFF)

    def __str__(self) -> str:
        return f"{self.incarnation}.{self.step}"


class TrajectoryId(NamedTuple):
    """One episode: sample `sample` of the prompt issued as `group_id`, in its `attempt`-th try."""

    group_id: int
    sample: int
    attempt: int = 0

    def __str__(self) -> str:
        return f"group={self.group_id}/sample={self.sample}/attempt={self.attempt}"


class Extension(NamedTuple):
    """The checked reference of a step that carries only its new prompt tokens.

    The full prompt is the first `length` tokens (prompt and response) of step `step` of the same trajectory,
    whose `service.handoff.prefixes.digest` is `digest`, followed by the step's own `prompt_ids`.
    """

    step: int
    length: int
    digest: int


class Sender(NamedTuple):
    """Who sent a message: the generator's name, its incarnation, and its own running message number."""

    generator: str
    incarnation: int
    sequence: int


def _check_axis(record: object, names: tuple[str, ...], length: int) -> None:
    """ValueError unless every column that is there has as many items as its axis."""
    for name in names:
        column = getattr(record, name)
        if column is not None and len(column) != length:
            raise ValueError(f"{type(record).__name__}.{name} has {len(column)} items; its axis has {length}")


def check_token_ids(name: str, ids: ArrayLike) -> None:
    """ValueError unless these are whole numbers that fit int32, the type that tables hold them in."""
    array = np.asarray(ids)
    if array.dtype == np.int32 or not array.size:
        return
    if array.dtype.kind not in "iu" or array.min() < 0 or array.max() > np.iinfo(np.int32).max:
        raise ValueError(f"{name} holds what is no int32 token id: {array.dtype} from {array.min()} to {array.max()}")


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One LLM call as an object: what the rollout makes, before it becomes a row of a `Steps` table."""

    trajectory: TrajectoryId
    prompt_uid: str
    index: int
    prompt_ids: Int32s
    """[P] the whole prompt; or, when `extends` is set, only what follows the referenced tokens."""
    response_ids: Int32s
    """[T] generated tokens only, plus an end-of-sequence token that the loop appended (mask 0)."""
    logprobs: Float32s | None
    """[T] of the sampling distribution; None when the engine gave none."""
    loss_mask: Bools
    """[T] True where the policy sampled the token."""
    versions: Int64s
    """[T] packed `PolicyVersion`; NO_VERSION where loss_mask is False."""
    temperature: float = 1.0
    reward: float | Float32s = 0.0
    """A scalar, or [T] one per response token."""
    stop_reason: str = "stop"
    """Why the turn ended; empty where nobody said."""
    extends: Extension | None = None
    routed_experts: Int16s | None = None
    """[P + T, layers, topk]; ROUTE_NATIVELY where unknown."""

    def __post_init__(self) -> None:
        _check_axis(self, ("logprobs", "loss_mask", "versions"), len(self.response_ids))
        _check_axis(self, ("routed_experts",), len(self.prompt_ids) + len(self.response_ids))
        for name in ("prompt_ids", "response_ids"):
            check_token_ids(f"Step.{name}", getattr(self, name))
        rewards = np.asarray(self.reward)
        if rewards.dtype.kind not in "biuf" or not np.isfinite(rewards).all():
            raise ValueError(f"Step.reward is {self.reward!r}; it must be a finite number, or one per response token")
        if rewards.ndim:
            _check_axis(self, ("reward",), len(self.response_ids))


class TrajectoryEnd(NamedTuple):
    """The record that closes a trajectory, so that one whose next turn was aborted still ends."""

    trajectory: TrajectoryId
    prompt_uid: str
    n_steps: int
    stop_reason: str
    reward: float


@dataclass(frozen=True, slots=True, eq=False)
class Steps:
    """K steps as columns (see the module's example)."""

    uids: tuple[str, ...]
    stop_reasons: tuple[str, ...]
    group_id_K: Int64s
    sample_K: Int32s
    attempt_K: Int32s
    index_K: Int32s
    uid_K: Int32s
    """Index into `uids`."""
    stop_reason_K: Int32s
    """Index into `stop_reasons`."""
    temperature_K: Float32s
    reward_K: Float64s
    """The step's scalar reward; the sum over its tokens where it has token rewards."""
    has_logprobs_K: Bools
    prompt_length_K: Int32s
    """Prompt tokens that the step itself carries."""
    extends_K: Int32s
    """Index of the step that this one extends, -1 for a full prompt."""
    extends_length_K: Int32s
    extends_digest_K: Uint64s
    offsets_K: Int64s
    token_ids_N: Int32s
    logprobs_N: Float32s
    loss_mask_N: Bools
    versions_N: Int64s
    token_rewards_N: Float32s | None = None
    routed_experts_N: Int16s | None = None
    """[N, layers, topk]"""

    def __post_init__(self) -> None:
        _check_axis(self, _STEP_COLUMNS, len(self.group_id_K))
        _check_axis(self, ("offsets_K",), len(self.group_id_K) + 1)
        _check_axis(self, _TOKEN_COLUMNS, len(self.token_ids_N))

    def __len__(self) -> int:
        return len(self.group_id_K)


@dataclass(frozen=True, slots=True, eq=False)
class Ends:
    """E trajectory ends as columns."""

    uids: tuple[str, ...]
    stop_reasons: tuple[str, ...]
    group_id_E: Int64s
    sample_E: Int32s
    attempt_E: Int32s
    uid_E: Int32s
    n_steps_E: Int32s
    stop_reason_E: Int32s
    reward_E: Float64s

    def __post_init__(self) -> None:
        _check_axis(self, _END_COLUMNS, len(self.group_id_E))

    def __len__(self) -> int:
        return len(self.group_id_E)


@dataclass(frozen=True, slots=True, eq=False)
class StepGroup:
    """One message on the wire, generator -> buffer: any number of steps and ends of one or several trajectories."""

    sender: Sender
    steps: Steps
    ends: Ends


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One training sequence: the steps `first_step..last_step` of a trajectory that share a prefix."""

    trajectory: TrajectoryId
    prompt_uid: str
    first_step: int
    last_step: int
    prompt_ids: Int32s
    response_ids: Int32s
    """[T] responses and the observations between them."""
    logprobs: Float32s | None
    loss_mask: Bools
    versions: Int64s
    temperature: float
    rewards: Float32s
    """[T] a step's scalar reward sits on its last response token."""
    stop_reason: str
    routed_experts: Int16s | None = None
    reward: float | None = None
    """The last step's scalar reward; None where rewards came per token."""


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """R rows as columns; token arrays as in `Steps`."""

    uids: tuple[str, ...]
    stop_reasons: tuple[str, ...]
    group_id_R: Int64s
    sample_R: Int32s
    attempt_R: Int32s
    uid_R: Int32s
    stop_reason_R: Int32s
    first_step_R: Int32s
    last_step_R: Int32s
    temperature_R: Float32s
    has_logprobs_R: Bools
    prompt_length_R: Int32s
    offsets_R: Int64s
    token_ids_N: Int32s
    logprobs_N: Float32s
    loss_mask_N: Bools
    versions_N: Int64s
    token_rewards_N: Float32s | None = None
    """A step's scalar reward sits on its last response token; None where the merge was not asked for rewards."""
    routed_experts_N: Int16s | None = None
    reward_R: Float64s | None = None
    """The last step's scalar reward; None where rewards came per token."""

    def __post_init__(self) -> None:
        _check_axis(self, _ROW_COLUMNS, len(self.group_id_R))
        _check_axis(self, ("offsets_R",), len(self.group_id_R) + 1)
        _check_axis(self, _TOKEN_COLUMNS, len(self.token_ids_N))

    def __len__(self) -> int:
        return len(self.group_id_R)


_TOKEN_COLUMNS = ("logprobs_N", "loss_mask_N", "versions_N", "token_rewards_N", "routed_experts_N")
_STEP_COLUMNS = tuple(name for name in Steps.__slots__ if name.endswith("_K") and name != "offsets_K")
_END_COLUMNS = tuple(name for name in Ends.__slots__ if name.endswith("_E"))
_ROW_COLUMNS = tuple(name for name in Rows.__slots__ if name.endswith("_R") and name != "offsets_R")


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """Rows of one rank, packed into one forward pass of at most the token budget."""

    token_ids_N: Int32s
    offsets_R: Int64s
    """[R + 1] the rows' bounds on the token axis (`cu_seqlens`)."""
    loss_mask_N: Bools
    """True on a token that carries loss; stale and masked tokens are False already."""
    logprobs_N: Float32s
    """Log-probability of token n under the policy that sampled it; 0 where the mask is False."""
    staleness_N: Int32s
    """Versions between sampling and training; -1 where no policy sampled the token."""
    temperature_R: Float32s
    trajectory_of_row_R: Int32s
    """Index into the mini-batch's `_G` arrays; the same on every rank. -1 for a dummy row, which carries no loss."""
    routed_experts_N: Int16s | None = None


@dataclass(frozen=True, slots=True, eq=False)
class MiniBatch:
    """Exactly `mini_batch_size` whole groups: one optimizer step."""

    lease: int
    """The lease's number; commit and release name it."""
    groups: tuple[int, ...]
    """[P] group_ids, in the order of training."""
    advantage_G: Float32s
    """The scalar advantage per trajectory; it is broadcast to tokens on the device."""
    return_G: Float64s
    loss_tokens_G: Int64s
    """Tokens of the trajectory that carry loss, over all its rows."""
    rows_G: Int32s
    prompt_of_trajectory_G: Int32s
    """Index into `groups`."""
    ranks: tuple[tuple[MicroBatch, ...], ...]
    """Per data-parallel rank its micro-batches; the same number on every rank."""
    metrics: dict[str, float]
    """What was measured about the batch: lengths, padding, merge, staleness; keys as in docs/metrics.md."""


class RefusalReason(StrEnum):
    """Why something was refused; also the metric's label."""

    SCHEMA = "schema"
    TOO_LARGE = "too_large"
    MALFORMED = "malformed"
    CHECKSUM = "checksum"
    FENCED = "fenced"
    UNKNOWN_GROUP = "unknown_group"
    CLOSED_GROUP = "closed_group"
    IDENTITY = "identity"
    LENGTH_MISMATCH = "length_mismatch"
    EMPTY = "empty"
    TOKEN_RANGE = "token_range"
    REWARD = "reward"
    LOGPROB = "logprob"
    VERSION = "version"
    TEMPERATURE = "temperature"
    STEP_ORDER = "step_order"
    CONFLICT = "conflict"
    PREFIX = "prefix"
    LENGTH_LIMIT = "length_limit"
    ADVANTAGE = "advantage"
    LEASE = "lease"
    MAX_ATTEMPTS = "max_attempts"
    MAX_LEASE_ATTEMPTS = "max_lease_attempts"


class Refusal(NamedTuple):
    """Bad data, as a value: why, where in the message, and the offending number."""

    reason: RefusalReason
    path: str
    number: float | None = None

    def __str__(self) -> str:
        number = "" if self.number is None else f" ({self.number:g})"
        return f"{self.reason} at {self.path}{number}"
