"""The data of a run: steps -> trajectories -> rows -> mini-batches.

Axis letters, here and everywhere: `P` prompts, which are groups in a mini-batch, `G` trajectories, `K` steps, `E` end
records, `S` the steps about which end records have values, `R` rows, `C` segments of rows, `V` trajectories of a role,
`X` turns of all trajectories, `T` tokens of one step or row, or turns of one trajectory, `Q` tokens of a prompt, `N`
packed tokens, `H` runs of equal values, `U` ids of supports. Offsets have one entry more than their axis: `offsets_K`
has K + 1.

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
from typing import Annotated, Any, NamedTuple

import numpy as np

from service.columns import About, Table
from service.columns import Bools as Bools
from service.columns import Float32s as Float32s
from service.columns import Float64s as Float64s
from service.columns import Int16s as Int16s
from service.columns import Int32s as Int32s
from service.columns import Int64s as Int64s
from service.columns import Uint8s as Uint8s
from service.columns import Uint16s as Uint16s
from service.columns import Uint64s as Uint64s

NO_VERSION = -1
"""The version of a token that no policy sampled: prompt, observation, appended end."""

ROUTE_NATIVELY = -1
"""The routed expert of a token whose routing was not recorded."""

Experts = Int16s | Uint8s
"""Arrays of expert numbers: uint8 if all numbers of the model's experts fit, else int16 (`service.columns.widened`)."""


Ids = Int32s | Uint16s
"""Arrays of token ids: uint16 if all ids of the vocabulary fit, else int32."""
MAX_SUPPORT = 512
"""Maximum size of a support: the tokens among which the sampler drew a token."""


def max_support(sampler: Any) -> int:
    """Maximum size of a support under a sampler's settings `top_p`, `top_k` and `min_p`; 0: it leaves out no token."""
    truncates = sampler.top_p < 1 or sampler.top_k or sampler.min_p
    return (sampler.top_k or MAX_SUPPORT) if truncates else 0


class PolicyVersion(NamedTuple):
    """A version of the weights: (trainer incarnation, number of optimizer steps). Newer versions compare as greater."""

    incarnation: int
    step: int

    def pack(self) -> int:
        """The version as one int64, `incarnation << 32 | step`; packed versions sort in the same order as versions."""
        return self.incarnation << 32 | self.step

    @staticmethod
    def unpack(packed: int) -> PolicyVersion:
        return PolicyVersion(packed >> 32, packed & 0xFFFFFFFF)

    def __str__(self) -> str:
        return f"{self.incarnation}:{self.step}"


class TrajectoryId(NamedTuple):
    """Identifies one attempt at a trajectory: its group, its number in the group and its attempt, both from 0."""

    group_id: int
    sample: int
    attempt: int = 0

    def __str__(self) -> str:
        return f"group={self.group_id}/sample={self.sample}/attempt={self.attempt}"


class EvaluationId(TrajectoryId):
    """Identifies a trajectory of an evaluation, which the buffer never receives; `group_id` is its prompt's row."""

    def __str__(self) -> str:
        return f"evaluation/row={self.group_id}/sample={self.sample}"


class Extension(NamedTuple):
    """A step's reference to an earlier step of its trajectory: the prompt begins with the first `length` tokens (prompt
    and response) of step `step`. `digest` is the `service.columns.digest` of these tokens, which are not sent again."""

    step: int
    length: int
    digest: int


class Sender(NamedTuple):
    """Identifies a message: its generator, the generator's incarnation, and the number that the generator gave it."""

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
    """[Q] the token ids of the whole prompt; with `extends`, only of the part after the extended tokens."""
    response_ids: Int32s
    """[T] the generated token ids; last, an end-of-sequence token if the agent loop appended one (mask False)."""
    logprobs: Float32s | None
    """[T] log-probabilities under the sampling distribution; None if the engine returned none."""
    loss_mask: Bools
    """[T] True where the policy sampled the token."""
    versions: Int64s
    """[T] the packed `PolicyVersion` that sampled each token; NO_VERSION where loss_mask is False."""
    temperature: float = 1.0
    reward: float = 0.0
    stop_reason: str = "stop"
    """Why the turn ended; empty if unknown."""
    extends: Extension | None = None
    routed_experts: Experts | None = None
    """[Q + T, layers, topk] the experts to which each token was routed; ROUTE_NATIVELY where unknown."""
    support_size: Uint16s | None = None
    """[T] the number of tokens among which each token was drawn; 0: all tokens. None: 0 for every token."""
    support: Ids | None = None
    """[U] the ids of these tokens, ascending, without the drawn token; one drawn token's ids after another's."""
    note: str = ""
    """Data with which a generator continues the trajectory after a restart; the buffer returns it unchanged."""

    def __post_init__(self) -> None:
        prompt, response = len(self.prompt_ids), len(self.response_ids)
        lengths = dict.fromkeys(("logprobs", "loss_mask", "versions", "support_size"), response)
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
    """The end record of a trajectory: it closes the trajectory, even if the next turn was aborted."""

    trajectory: TrajectoryId
    prompt_uid: str
    n_steps: int
    stop_reason: str
    reward: float
    roles: bytes = b""
    """The role of each step, one byte per step (`service.handoff.steps.values`); empty: every role is `main`."""
    transcript: bytes = b""
    """The output of an agent's run, in UTF-8; empty if it was not kept."""
    rewards: tuple[float, ...] = ()
    """For each step, a reward given after the step was sent, which adds to the step's own reward; empty: none."""
    info: str = ""
    """The environment's numbers about the trajectory (`service.handoff.steps.info`); empty: none."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TrainedTokens:
    """The columns with one item per token that tables of steps, tables of rows and micro-batches all have."""

    token_ids_N: Annotated[Int32s, About("prompt part first, response part after it", on_prompt=True)]
    logprobs_N: Annotated[Float32s, About("log-probability under the distribution that sampled the token", fill=0)]
    loss_mask_N: Annotated[Bools, About("true where the policy sampled the token", fill=0)]
    """True where the policy sampled the token; in a micro-batch, False for stale and masked tokens too."""
    routed_experts_N: Annotated[
        Int16s | Uint8s | None,
        About("`[N, layers, topk]`, -1 (as a byte 255) where unknown", fill=ROUTE_NATIVELY, on_prompt=True, ndim=3),
    ] = None
    teacher_logprobs_N: Annotated[
        Float32s | None, About("log-probability under the teacher, from its scorer; NaN: none", fill=np.nan)
    ] = None
    support_size_N: Annotated[
        Uint16s | None, About("size of the support, the tokens among which the sampler drew; 0: all tokens")
    ] = None
    support_U: Annotated[
        Int32s | Uint16s | None,
        About("support without the drawn token, ascending; uint16 if all ids fit", sizes="support_size_N"),
    ] = None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Tokens(TrainedTokens):
    """All columns with one item per token that tables of steps and tables of rows have."""

    versions_N: Annotated[Int64s, About("packed policy version; -1 where no policy sampled the token", fill=NO_VERSION)]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Steps(Tokens, Table):
    """A table of K steps, as columns (see the example in the module's text). The fields say which data a step has."""

    uids: tuple[str, ...]
    stop_reasons: tuple[str, ...]
    notes: tuple[str, ...]
    group_id_K: Annotated[Int64s, About("the group")]
    sample_K: Annotated[Int32s, About("the trajectory's number in the group")]
    attempt_K: Annotated[Int32s, About("the trajectory's attempt")]
    index_K: Annotated[Int32s, About("place in the trajectory, from 0")]
    uid_K: Annotated[Int32s, About("prompt, as an index into the message's uids")]
    stop_reason_K: Annotated[Int32s, About("index into the message's stop reasons")]
    note_K: Annotated[Int32s, About("data to continue with, as an index into the notes")]
    temperature_K: Annotated[Float32s, About("sampling temperature")]
    reward_K: Annotated[Float64s, About("reward of the step")]
    has_logprobs_K: Annotated[Bools, About("whether the engine gave log-probabilities")]
    prompt_length_K: Annotated[Int32s, About("prompt tokens that the step itself carries")]
    extends_K: Annotated[Int32s, About("index of the step that the prompt extends; -1: none")]
    extends_length_K: Annotated[Int32s, About("how many of that step's tokens begin the prompt")]
    extends_digest_K: Annotated[Uint64s, About("xxh3-64 of those tokens as int32")]
    offsets_K: Annotated[Int64s, About("where each step's tokens begin, then where they end")]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Ends(Table):
    """A table of E end records (`TrajectoryEnd`), as columns. An example of three end records, of which only
    the last has roles (main, aux) and later rewards:

    step_offsets_E [0 0 0 2]    role_S [0 2]    later_reward_S [0.5 0]
    """

    uids: tuple[str, ...]
    stop_reasons: tuple[str, ...]
    infos: tuple[str, ...]
    group_id_E: Int64s
    sample_E: Int32s
    attempt_E: Int32s
    uid_E: Int32s
    n_steps_E: Int32s
    stop_reason_E: Int32s
    info_E: Int32s
    reward_E: Float64s
    step_offsets_E: Int64s
    """[E + 1] where the steps of each end record begin on axis `S`; no steps if it has no roles or later rewards."""
    role_S: Uint8s
    """[S] the number of each step's role (`service.handoff.steps.values`)."""
    later_reward_S: Float64s
    """[S] for each step, a reward that was given after the step was sent, in addition to its own reward."""
    offsets_E: Int64s
    transcript_N: Uint8s
    """The transcripts (outputs of agents' runs) of all end records, in UTF-8."""


@dataclass(frozen=True, slots=True, eq=False)
class StepGroup:
    """One message, generator -> buffer: any number of steps and end records, of one or several groups."""

    sender: Sender
    steps: Steps
    ends: Ends


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One training sequence as an object: the steps of a trajectory from `first_step` to `last_step`."""

    trajectory: TrajectoryId
    prompt_uid: str
    first_step: int
    last_step: int
    prompt_ids: Int32s
    response_ids: Int32s
    """[T] the token ids of all responses, and of the observations between responses."""
    logprobs: Float32s | None
    loss_mask: Bools
    versions: Int64s
    temperature: float
    stop_reason: str
    reward: float
    """The reward of the row's last step."""
    routed_experts: Experts | None = None
    support_size: Uint16s | None = None
    support: Ids | None = None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Rows(Tokens, Table):
    """A table of R rows, as columns; the token columns have the same order of tokens as in `Steps`."""

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
    """The reward of the row's last step."""
    turn_N: Int32s | None = None
    """The step of each token, as a position in the table of steps that was merged; None if not recorded (`by_turn`)."""


class SupervisedRow(NamedTuple):
    """A sequence for supervised training: token ids [T], and a mask [T]: True for the assistant's and end tokens."""

    token_ids: Int32s
    loss_mask: Bools


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class MicroBatch(TrainedTokens):
    """Rows of one rank, packed for one forward pass within the token budget."""

    offsets_R: Int64s
    """[R + 1] the position on the token axis at which each row begins, then the end of the last row (`cu_seqlens`)."""
    staleness_N: Int32s
    """The staleness of each token, in versions; -1 where no policy sampled the token."""
    temperature_R: Float32s
    trajectory_of_row_R: Int32s
    """The trajectory of each row, as an index into the mini-batch's `_G` arrays; -1 for a row without loss (dummy)."""
    turn_N: Int32s | None = None
    """The index of each token's turn in `turn_advantage_X`; None for dummy rows, and if `turn_advantage_X` is None."""


@dataclass(frozen=True, slots=True, eq=False)
class MiniBatch:
    """The groups of one optimizer step: exactly `mini_batch_size` whole groups."""

    lease: int
    """The number of the lease, by which `commit` and `release` refer to it."""
    groups: tuple[int, ...]
    """[P] the group_ids, in the order of the lease."""
    advantage_G: Float32s
    """The advantage of each trajectory; if its turns may have different advantages, the mean over its turns."""
    return_G: Float64s
    loss_tokens_G: Int64s
    """The number of tokens of each trajectory that carry loss, summed over the trajectory's rows."""
    rows_G: Int32s
    prompt_of_trajectory_G: Int32s
    """The group of each trajectory, as an index into `groups`."""
    ranks: tuple[tuple[MicroBatch, ...], ...]
    """The micro-batches of each data-parallel rank; every rank has the same number of micro-batches."""
    metrics: dict[str, float]
    """Metrics of the mini-batch, by name; docs/metrics.md describes them."""
    turn_advantage_X: Float32s | None = None
    """The advantage of each turn, trajectory by trajectory; None if all turns of a trajectory have one advantage."""


class RefusalReason(StrEnum):
    """The reasons of refusals; a metric that counts refusals has them as a label."""

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
    """The answer to bad data, in place of an exception: the reason, the place in the message, and the bad number."""

    reason: RefusalReason
    path: str
    number: float | None = None

    def __str__(self) -> str:
        number = "" if self.number is None else f" ({self.number:g})"
        return f"{self.reason} at {self.path}{number}"
