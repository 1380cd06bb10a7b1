"""The data of a run: steps -> trajectories -> rows -> mini-batches.

Axis letters, here and everywhere: `P` prompts, which are groups in a mini-batch, `G` trajectories, `K` steps, `E`
trajectory ends, `S` the steps that ends describe, `R` rows, `C` segments of rows, `V` trajectories of one role, `X`
turns of all trajectories, `T` tokens of one step or row, or turns of one trajectory, `Q` tokens of a prompt, `N` packed
tokens, `H` runs of equal values. An offsets array has one entry more than its axis, `offsets_K` for example K + 1.

A table of steps or rows is columnar: one array per field, and every per-token array shares one token axis.
Item `k` owns tokens `offsets[k]:offsets[k+1]`, its prompt part first, its response part after it:

    offsets_K      [0               5       9]
    token_ids_N    [10 20 30 | 40 50 || 60 70 | 80 90]   step 0: prompt 10 20 30, response 40 50
    prompt_length_K [3               2]                  step 1: extends step 0 by 60 70, response 80 90
    loss_mask_N    [ 0  0  0    1  1  0  0    1  1]      (prompt tokens: mask 0, log-probability 0, no version)
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, NamedTuple

import numpy as np

from service.columns import About, Table
from service.columns import Bools as Bools
from service.columns import Float32s as Float32s
from service.columns import Float64s as Float64s
from service.columns import Int16s as Int16s
from service.columns import Int32s as Int32s
from service.columns import Int64s as Int64s
from service.columns import Uint8s as Uint8s
from service.columns import Uint64s as Uint64s

NO_VERSION = -1
"""The version of a token that no policy sampled: prompt, observation, appended end."""

ROUTE_NATIVELY = -1
"""The routed expert of a token whose routing was not recorded."""

Experts = Int16s | Uint8s
"""Expert numbers, in bytes if the model has at most 256 experts; see `service.columns.widened`."""


class PolicyVersion(NamedTuple):
    """The weights that sampled a token: (trainer incarnation, optimizer steps); ordered."""

    incarnation: int
    step: int

    def pack(self) -> int:
        """One int64: `incarnation << 32 | step`, in the same order as the pair."""
        return self.incarnation << 32 | self.step

    @staticmethod
    def unpack(packed: int) -> PolicyVersion:
        return PolicyVersion(packed >> 32, packed & 0xFFFFFFFF)

    def __str__(self) -> str:
        return f"{self.incarnation}:{self.step}"


class TrajectoryId(NamedTuple):
    """One episode: an attempt of a sample of the prompt issued as `group_id`."""

    group_id: int
    sample: int
    attempt: int = 0

    def __str__(self) -> str:
        return f"group={self.group_id}/sample={self.sample}/attempt={self.attempt}"


class EvaluationId(TrajectoryId):
    """A trajectory of an evaluation, which the buffer does not receive; `group_id` is the row of its prompt."""

    def __str__(self) -> str:
        return f"evaluation/row={self.group_id}/sample={self.sample}"


class Extension(NamedTuple):
    """The checked reference of a step that carries only its new prompt tokens: they follow the first `length` tokens
    (prompt and response) of step `step` of the same trajectory, whose `service.columns.digest` is `digest`."""

    step: int
    length: int
    digest: int


class Sender(NamedTuple):
    """The sender of a message: generator, incarnation, and the generator's own running message number."""

    generator: str
    incarnation: int
    sequence: int


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One LLM call as an object, before it becomes an item of a `Steps` table."""

    trajectory: TrajectoryId
    prompt_uid: str
    index: int
    prompt_ids: Int32s
    """[Q] the whole prompt; or, when `extends` is set, only what follows the referenced tokens."""
    response_ids: Int32s
    """[T] generated tokens only, plus an end-of-sequence token that the loop appended (mask 0)."""
    logprobs: Float32s | None
    """[T] log-probabilities under the sampling distribution; None if the engine returned none."""
    loss_mask: Bools
    """[T] True where the policy sampled the token."""
    versions: Int64s
    """[T] packed `PolicyVersion`; NO_VERSION where loss_mask is False."""
    temperature: float = 1.0
    reward: float = 0.0
    stop_reason: str = "stop"
    """Why the turn ended; empty if unknown."""
    extends: Extension | None = None
    routed_experts: Experts | None = None
    """[Q + T, layers, topk]; ROUTE_NATIVELY where unknown."""
    note: str = ""
    """What a generator needs to continue after this step; the buffer returns it unchanged."""
    portable: bool = False
    """Whether the note lets any generator continue after this step; otherwise only the generator that wrote it can."""

    def __post_init__(self) -> None:
        prompt, response = len(self.prompt_ids), len(self.response_ids)
        lengths = {"logprobs": response, "loss_mask": response, "versions": response}
        lengths["routed_experts"] = prompt + response
        for name, length in lengths.items():
            array = getattr(self, name)
            if array is not None and len(array) != length:
                raise ValueError(f"Step.{name} has {len(array)} items; its axis has {length}")
        for name in ("prompt_ids", "response_ids"):
            ids = np.asarray(getattr(self, name))
            if ids.dtype == np.int32 or not ids.size:
                continue
            if ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() > np.iinfo(np.int32).max:
                bounds = f"{ids.dtype} from {ids.min()} to {ids.max()}"
                raise ValueError(f"Step.{name} holds what is no int32 token id: {bounds}")
        reward = np.asarray(self.reward)
        if reward.ndim or reward.dtype.kind not in "biuf" or not np.isfinite(reward):
            raise ValueError(f"Step.reward is {self.reward!r}; it must be a finite number")


class TrajectoryEnd(NamedTuple):
    """The record that closes a trajectory, even a trajectory whose next turn was aborted."""

    trajectory: TrajectoryId
    prompt_uid: str
    n_steps: int
    stop_reason: str
    reward: float
    roles: bytes = b""
    """The role of each step, see `service.handoff.steps.roles`; empty: all are `main`."""
    transcript: bytes = b""
    """The output of an agent's run, in UTF-8; empty if it was not kept."""
    rewards: tuple[float, ...] = ()
    """For each step, the reward given after the step was sent, in addition to the step's own; empty: none."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TrainedTokens:
    """Token columns of steps, rows and micro-batches; columns added here travel from generator to trainer."""

    token_ids_N: Annotated[Int32s, About("prompt part first, response part after it", on_prompt=True)]
    logprobs_N: Annotated[Float32s, About("log-probability under the distribution that sampled the token", fill=0)]
    loss_mask_N: Annotated[Bools, About("true where the policy sampled the token", fill=0)]
    """In a micro-batch: True for tokens that carry loss, so False for stale and masked tokens."""
    routed_experts_N: Annotated[
        Int16s | Uint8s | None,
        About("`[N, layers, topk]`, -1 (as a byte 255) where unknown", fill=ROUTE_NATIVELY, on_prompt=True, ndim=3),
    ] = None
    teacher_logprobs_N: Annotated[
        Float32s | None, About("log-probability under the teacher, from its scorer; NaN: none", fill=np.nan)
    ] = None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Tokens(TrainedTokens):
    """All token columns of steps and rows."""

    versions_N: Annotated[Int64s, About("packed policy version; -1 where no policy sampled the token", fill=NO_VERSION)]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Steps(Tokens, Table):
    """K steps as columns (see the module's example). This is the definition of a step: its fields are the columns."""

    uids: tuple[str, ...]
    stop_reasons: tuple[str, ...]
    notes: tuple[str, ...]
    group_id_K: Annotated[Int64s, About("the group")]
    sample_K: Annotated[Int32s, About("the trajectory's number in the group")]
    attempt_K: Annotated[Int32s, About("the trajectory's attempt")]
    index_K: Annotated[Int32s, About("place in the trajectory, from 0")]
    uid_K: Annotated[Int32s, About("prompt, as an index into the message's uids", compare="names")]
    stop_reason_K: Annotated[Int32s, About("index into the message's stop reasons", compare="names")]
    note_K: Annotated[Int32s, About("what its generator continues with, as an index into the notes", compare="names")]
    temperature_K: Annotated[Float32s, About("sampling temperature")]
    reward_K: Annotated[Float64s, About("reward of the step")]
    has_logprobs_K: Annotated[Bools, About("whether the engine gave log-probabilities")]
    prompt_length_K: Annotated[Int32s, About("prompt tokens that the step itself carries", compare="form")]
    extends_K: Annotated[Int32s, About("index of the step that this one extends, -1 for a full prompt", compare="form")]
    extends_length_K: Annotated[Int32s, About("how many tokens of that step the prompt begins with", compare="form")]
    extends_digest_K: Annotated[Uint64s, About("xxh3-64 of those tokens as int32", compare="form")]
    offsets_K: Annotated[Int64s, About("where each step's tokens begin; the last one: their end", compare="form")]
    portable_K: Annotated[Bools | None, About("whether any generator can continue after the step", fill=False)] = None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Ends(Table):
    """E trajectory ends as columns.

    ends of 2, 1 and 2 steps; the last one has the roles main and aux, and gave its first step 0.5 later:
    step_offsets_E [0 0 0 2]    role_S [0 2]    later_reward_S [0.5 0]
    """

    uids: tuple[str, ...]
    stop_reasons: tuple[str, ...]
    group_id_E: Int64s
    sample_E: Int32s
    attempt_E: Int32s
    uid_E: Int32s
    n_steps_E: Int32s
    stop_reason_E: Int32s
    reward_E: Float64s
    step_offsets_E: Int64s
    """Where on the axis `S` the steps of each end begin; an end without values for its steps has none there."""
    role_S: Uint8s
    """The role of each step, as its number (`service.handoff.steps.roles`)."""
    later_reward_S: Float64s
    """The reward given to each step after it was sent, in addition to its own reward."""
    offsets_E: Int64s
    transcript_N: Uint8s
    """The output of agents, in UTF-8, end after end."""


@dataclass(frozen=True, slots=True, eq=False)
class StepGroup:
    """One message, generator -> buffer: any number of steps and trajectory ends, of one or several groups."""

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
    stop_reason: str
    reward: float
    """The last step's reward."""
    routed_experts: Experts | None = None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Rows(Tokens, Table):
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
    reward_R: Float64s
    """The last step's reward."""
    turn_N: Int32s | None = None
    """The position of each token's step among the merged steps; None unless the merge recorded it."""


class SupervisedRow(NamedTuple):
    """The tokens [T] of a demonstration, or of a part of one; the mask is True on the assistant's tokens and ends."""

    token_ids: Int32s
    loss_mask: Bools


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class MicroBatch(TrainedTokens):
    """Rows of one rank, packed into one forward pass within the token budget."""

    offsets_R: Int64s
    """[R + 1] the rows' bounds on the token axis (`cu_seqlens`)."""
    staleness_N: Int32s
    """Versions between sampling and training; -1 where no policy sampled the token."""
    temperature_R: Float32s
    trajectory_of_row_R: Int32s
    """Index into the mini-batch's `_G` arrays; the same on every rank. -1 for a dummy row, which carries no loss."""
    turn_N: Int32s | None = None
    """Index into the mini-batch's `turn_advantage_X`; None without credit by turn, and for dummy rows."""


@dataclass(frozen=True, slots=True, eq=False)
class MiniBatch:
    """The groups of one optimizer step: exactly `mini_batch_size` whole groups."""

    lease: int
    """The lease's number; commit and release name it."""
    groups: tuple[int, ...]
    """[P] group_ids, in the order of training."""
    advantage_G: Float32s
    """The scalar advantage per trajectory; with credit by turn, the mean over its turns."""
    return_G: Float64s
    loss_tokens_G: Int64s
    """Tokens that carry loss, over all rows of the trajectory."""
    rows_G: Int32s
    prompt_of_trajectory_G: Int32s
    """Index into `groups`."""
    ranks: tuple[tuple[MicroBatch, ...], ...]
    """The micro-batches of each data-parallel rank; the same number on every rank."""
    metrics: dict[str, float]
    """Keys as in docs/metrics.md."""
    turn_advantage_X: Float32s | None = None
    """With credit by turn: the advantage of every turn of every trajectory, in order (`handoff.batches.advantages`)."""


class RefusalReason(StrEnum):
    """The reason of a refusal; also the metric's label."""

    SCHEMA = "schema"
    TOO_LARGE = "too_large"
    MALFORMED = "malformed"
    CHECKSUM = "checksum"
    FENCED = "fenced"
    UNKNOWN_GROUP = "unknown_group"
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
    SCORER = "scorer"
    LEASE = "lease"
    MAX_ATTEMPTS = "max_attempts"
    MAX_LEASE_ATTEMPTS = "max_lease_attempts"


class Refusal(NamedTuple):
    """Bad data as a value: the reason, the place in the message, and the offending number."""

    reason: RefusalReason
    path: str
    number: float | None = None

    def __str__(self) -> str:
        number = "" if self.number is None else f" ({self.number:g})"
        return f"{self.reason} at {self.path}{number}"
