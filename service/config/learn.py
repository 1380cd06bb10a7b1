"""Settings of the algorithm, the trainer, its adapter and the publication of weights."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import BeforeValidator, Field

from service.config.section import MOST, Band, Count, Decay, Fraction, NotNegative, Positive, Seconds, Section

Target = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
"""A linear layer inside a decoder layer. The embedding and the output head are not allowed: they may be tied, and an
adapter would make their weights differ, so engine and trainer would disagree on log-probabilities."""

LINEAR: tuple[Target, ...] = get_args(Target)
ATTENTION = LINEAR[:4]

SLOT_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks of the adapter slots with which an engine can be started. A slot takes adapters up to its rank."""


def _named(targets: object) -> object:
    """Replace PEFT's word `all-linear` by the names of all linear layers; return other values unchanged."""
    return LINEAR if targets == "all-linear" else targets


class LoraConfig(Section):
    """A low-rank adapter: each target layer W computes x W^T + alpha / rank (x A^T) B^T; only A and B are trained."""

    rank: Annotated[int, Field(gt=0, le=SLOT_RANKS[-1])] = 16
    """Rank of the update: rows of A, columns of B."""
    alpha: Annotated[float, Field(gt=0, le=1e6)] = 32.0
    """The update is multiplied by `alpha` / `rank`."""
    targets: Annotated[tuple[Target, ...], Field(min_length=1), BeforeValidator(_named)] = LINEAR
    """Linear layers that get an update, in every decoder layer; `all-linear`: all of them."""

    @property
    def slot_rank(self) -> int:
        """Rank of the adapter slot with which the engine is started: the smallest of `SLOT_RANKS` that is at least
        `rank`."""
        return next(rank for rank in SLOT_RANKS if rank >= self.rank)


class CorrectionConfig(Section):
    """Off-policy correction for tokens that were sampled by another policy than the trained one; see docs/learning.md.

    A token's ratio is its probability under the anchor divided by its probability under the rollout policy. With
    `anchor: rollout`, the trained policy takes the place of the anchor. A masked token has no loss, but counts in the
    denominator of the loss.
    """

    truncate: Literal["off", "token", "sequence"] = "off"
    """Multiply the loss of a token by a ratio truncated at `truncate_at` (TIS): the token's (`token`), or the product
    over its trajectory (`sequence`)."""
    truncate_at: Annotated[float, Field(gt=0)] = 2.0
    """Upper bound of the ratio."""
    token_band: Band | None = None
    """Mask tokens whose ratio is outside the band (IcePop; with a lower end of 0: masked importance sampling)."""
    sequence_band: Band | None = None
    """Mask trajectories whose product of ratios is outside the band."""
    geometric_band: Band | None = None
    """Mask trajectories whose geometric mean of ratios is outside the band."""
    outlier_band: Band | None = None
    """Mask trajectories with any token's ratio outside the band."""

    @property
    def is_on(self) -> bool:
        """True if the correction truncates or masks anything."""
        bands = (self.token_band, self.sequence_band, self.geometric_band, self.outlier_band)
        return self.truncate != "off" or any(band is not None for band in bands)


class ReferenceConfig(Section):
    """The reference policy of the KL term: a copy of the policy's weights, taken when RL begins."""

    refresh_every: NotNegative = 0
    """Optimizer steps after which the copy is taken again; 0: never."""
    on_cpu: bool = False
    """Keep each rank's shard of the copy in CPU memory while no forward pass uses it."""


class TeacherConfig(Section):
    """On-policy distillation: a term of the loss that pulls the policy towards a teacher; see docs/scorers.md."""

    coef: Annotated[float, Field(gt=0)] = 1.0
    """Weight of the teacher's term."""
    mode: Literal["advantage", "kl"] = "advantage"
    """`advantage`: add `coef` times the log-ratio of teacher to rollout to each token's advantage; `kl`: add `coef`
    times the KL divergence from the teacher to the loss."""
    column: str | None = None
    """Column of the dataset that names each row's teacher; a row may have none. None: one teacher for all rows."""


class AlgorithmConfig(Section):
    """How the loss is computed from rewards."""

    estimator: str = "grpo"
    """Advantage estimator: grpo, grpo_no_std, rloo, maxrl, reinforce++_baseline; or `your.module:name`."""
    n_samples_per_prompt: Count = 8
    """Trajectories of a group."""
    returns: Literal["last", "sum"] = "last"
    """Return of a trajectory: the reward at its end, or the sum over its steps."""
    credit: Literal["trajectory", "return_to_go"] = "trajectory"
    """Rewards of a turn's advantage: the trajectory's return, or the rewards from this turn on (`return_to_go`; needs
    `returns: sum`). See docs/credit.md."""
    filter_zero_variance: bool = False
    """Replace groups with equal returns (but for rounding); with credit by turn, groups whose advantages are all 0."""
    filter_over_long: Fraction | None = None
    """Replace groups if more than this fraction of their trajectories hit a length limit (`length`, `truncated`); None:
    off."""
    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Discount factor per turn, with credit by turn."""
    loss: str = "ppo_clip"
    """Policy loss: ppo_clip, dual_clip, cispo, gspo, rollout_is, importance_sampling, cross_entropy, or
    `your.module:name`."""
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """The ratio is clipped below 1 - `clip_low`."""
    clip_high: Annotated[float, Field(gt=0)] = 0.28
    """The ratio is clipped above 1 + `clip_high`."""
    dual_clip: Annotated[float, Field(gt=1)] = 3.0
    """For the loss `dual_clip`: largest ratio of a token with a negative advantage."""
    reduction: Literal["token_mean", "trajectory_mean", "prompt_mean", "seq_mean_token_sum_norm"] = "token_mean"
    """Weights of the loss tokens of one mini-batch, by number of tokens, trajectories or prompts (learning.md)."""
    norm_tokens: Positive | None = None
    """For `seq_mean_token_sum_norm`: the divisor, in tokens; None: max_input_length + max_generate_length."""
    anchor: Literal["rollout", "proximal"] = "rollout"
    """Policy in the denominator of the clipped ratio: the sampler of the token, or frozen weights (`proximal`)."""
    anchor_every: Positive = 1
    """For `proximal`: optimizer steps after which the frozen weights are taken again."""
    correction: CorrectionConfig = CorrectionConfig()
    entropy_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the entropy bonus."""
    kl_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL term; 0: neither a KL term nor a reference policy."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """KL estimate by the log-ratio d: `k1` d (with the gradient of `k2`), `k2` d^2 / 2, `k3` exp(-d) - 1 + d."""
    reference: ReferenceConfig = ReferenceConfig()
    teacher: TeacherConfig | None = None


class TrainerConfig(Section):
    """The trainer: a group of ranks that trains with FSDP."""

    ranks: Count = 2
    """Processes that train together, each with its own GPU if there are GPUs."""
    mini_batch_size: Count = 16
    """Groups of a mini-batch, which is one optimizer step."""
    max_tokens_per_micro_batch: Annotated[int, Field(gt=0, le=1 << 24)] = 16384
    """Tokens of one forward pass on one rank."""
    sequence_parallel: Count = 1
    """Ranks that share the tokens of each micro-batch, so that rows may be longer. Divides `ranks` and the model's
    heads; see docs/learning.md."""
    layout: Literal["auto", "packed", "padded", "shared_prefix"] = "auto"
    """`packed`: rows one after another; `padded`: rows padded on the left; `shared_prefix`: packed, and a common prefix
    is computed once; `auto`: `shared_prefix` if it saves at least a tenth of the tokens, else `packed`."""
    lr: Annotated[float, Field(gt=0)] = 1e-6
    """Highest learning rate of AdamW."""
    warmup_steps: NotNegative = 0
    """Optimizer steps over which the learning rate rises from 0."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate from the warm-up to `run.max_steps`."""
    min_lr_fraction: Fraction = 0.0
    """For `linear` and `cosine`: final learning rate, as a fraction of `lr`."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """AdamW's decoupled weight decay, a factor of the learning rate; not of norms and biases."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """AdamW's decay rates of the means of gradient and squared gradient."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Norm to which a larger gradient is scaled down."""
    gradient_checkpointing: bool | Annotated[int, Field(ge=2, le=MOST)] | Literal["auto"] = "auto"
    """Keep only the inputs of layers and compute the rest again in the backward pass. true: in all layers; n: in every
    n-th layer; auto: in none. On GPUs, ranks try the largest micro-batch when they load: if memory is too small, `auto`
    takes half of the layers, then all."""
    shard_within: Literal["all", "node"] = "all"
    """Shard the policy over all ranks, or within each node (`node`): nodes exchange only gradients, but each rank holds
    more."""
    reshard_after_forward: bool | Literal["auto"] = "auto"
    """true: gather the weights of layers again for the backward pass, which sends more bytes and takes less memory.
    auto: keep them if 15 % of the GPU's memory stays free with the largest micro-batch."""
    cpu_offload: bool = False
    """Keep weights, gradients and optimizer state in CPU memory."""
    compile: bool | None = None
    """Compile the decoder layers except experts: a start takes minutes longer, steps less time and memory. None:
    bfloat16 models on a GPU where the compiler works."""
    checkpoint_every: NotNegative = 0
    """Optimizer steps from one checkpoint to the next; 0: only the final weights."""
    keep_checkpoints: Positive = 2
    """Newest checkpoints that are kept."""
    accelerator: str | None = None
    """Ray's accelerator type of the nodes for the ranks, such as H100."""
    profile_steps: Annotated[int, Field(ge=0, le=20)] = 0
    """Optimizer steps, from the fourth on, of which rank 0 writes a torch profile to `profiles/`."""
    collective_deadline: Seconds = 120.0
    """Seconds in which a collective of a step must end."""

    @property
    def sharded(self) -> bool:
        """True if the ranks form a process group and shard the policy."""
        return self.ranks > 1

    @property
    def keeps_gathered(self) -> bool:
        """True if the ranks keep gathered weights for the backward pass, provided that there is enough memory."""
        return self.sharded and self.reshard_after_forward == "auto"

    @property
    def batch_parts(self) -> int:
        """Number of parts into which a mini-batch is divided: one part for each group of ranks that share
        micro-batches."""
        return self.ranks // self.sequence_parallel

    @property
    def tokens_of_micro_batch(self) -> int:
        """Maximum tokens of a micro-batch, over all ranks that share it."""
        return self.max_tokens_per_micro_batch * self.sequence_parallel


class WeightsConfig(Section):
    """How new weights get from the trainer to the engines."""

    sync_every: Positive = 1
    """Optimizer steps from one update of the engines to the next."""
    transport: Literal["memory", "ipc"] = "memory"
    """`memory`: engines read the ranks' shared memory; engines on other hosts read a copy, which NIXL (tested on CPUs
    only) or else Ray's object store transfers. `ipc`: by CUDA IPC on a GPU that a rank and an engine share;
    `generator.gpu_memory_utilization` must leave memory for the rank."""
    kv_cache: Literal["recompute", "keep"] = "recompute"
    """KV cache of running requests at an update: compute it again with the new weights, or keep it."""
    sync_deadline: Seconds = 300.0
    """Seconds in which an engine must load new weights, plus 1 for each 100 MB; a late engine restarts."""
    verify: bool = False
    """Let the run fail if engine and trainer disagree on the log-probabilities of more than a tenth of the newest
    policy's tokens in several successive steps: by more than 0.1 nats in bfloat16; in float32, 0.01 on a GPU or 0.001
    on a CPU."""
