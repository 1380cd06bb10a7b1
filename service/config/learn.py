"""Settings of the algorithm, the trainer and the publication of weights."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from service.config.section import MOST, Band, Count, Decay, Fraction, NotNegative, Positive, Seconds, Section


class CorrectionConfig(Section):
    """Off-policy correction for tokens that another policy than the trained one sampled; see docs/learning.md.

    A token's ratio is its probability under the anchor divided by its probability under the rollout policy; with
    `anchor: rollout`, the trained policy takes the place of the anchor. A masked token has no loss, but counts in the
    denominator of the loss.
    """

    truncate: Literal["off", "token", "sequence"] = "off"
    """Multiply the loss by the ratio of the token, or of the whole trajectory, truncated at `truncate_at` (TIS)."""
    truncate_at: Annotated[float, Field(gt=0)] = 2.0
    """Upper bound of the factor that `truncate` applies."""
    token_band: Band | None = None
    """Mask tokens whose ratio lies outside the band (IcePop; with a lower end of 0, MIS)."""
    sequence_band: Band | None = None
    """Mask trajectories whose product of ratios lies outside the band."""
    geometric_band: Band | None = None
    """Mask trajectories whose geometric mean of ratios lies outside the band."""
    outlier_band: Band | None = None
    """Mask trajectories in which the ratio of any token lies outside the band."""

    @property
    def is_on(self) -> bool:
        """Whether the correction truncates or masks anything."""
        bands = (self.token_band, self.sequence_band, self.geometric_band, self.outlier_band)
        return self.truncate != "off" or any(band is not None for band in bands)


class ReferenceConfig(Section):
    """The reference policy of the KL term: a copy of the policy's weights when RL began."""

    refresh_every: NotNegative = 0
    """Optimizer steps between two renewals of the copy; 0: it is never renewed."""
    on_cpu: bool = False
    """Keep each rank's shard of the copy in CPU memory, except during its forward pass."""


class TeacherConfig(Section):
    """On-policy distillation: a loss term that pulls the policy towards a teacher; see docs/scorers.md."""

    coef: Annotated[float, Field(gt=0)] = 1.0
    """Weight of the term."""
    mode: Literal["advantage", "kl"] = "advantage"
    """`advantage`: each token's advantage grows by the weighted log-ratio of teacher to rollout; `kl`: the loss grows
    by the weighted KL term (`kl_estimator`) against the teacher."""
    column: str | None = None
    """Column of the dataset with the name of each row's teacher, if any; None: the only teacher is used for every
    row."""


class AlgorithmConfig(Section):
    """How rewards become a loss."""

    step_wise: bool = True
    """Each turn is a step, and `buffer.merge` makes rows of steps; false: a trajectory is one sequence, in which
    observations have mask 0."""
    estimator: str = "grpo"
    """grpo, grpo_no_std, rloo, maxrl, reinforce++_baseline; reinforce++ (not step-wise), or `your.module:name`."""
    n_samples_per_prompt: Count = 8
    """Number of trajectories of a group."""
    returns: Literal["last", "sum"] = "last"
    """The return of a trajectory: the reward at its end, or the sum of the rewards of its steps."""
    credit: Literal["trajectory", "return_to_go"] = "trajectory"
    """Rewards that the advantage of a turn is computed from: the whole return, or the rewards from that turn on. The
    second needs `returns: sum`; see docs/credit.md."""
    filter_zero_variance: bool = False
    """Filter groups whose returns are all equal or, with credit by turn, groups in which every advantage is 0. Filtered
    groups are not trained, and other groups take their slots."""
    filter_over_long: Fraction | None = None
    """Filter groups in which more than this fraction of the trajectories ended at a length limit (stop reason `length`
    or `truncated`); None: off."""
    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Discount per sampled token, for `reinforce++`; per turn, with `credit` by turn."""
    loss: str = "ppo_clip"
    """ppo_clip, dual_clip, cispo, gspo, rollout_is, importance_sampling, cross_entropy, or `your.module:name`."""
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """The ratio is clipped below 1 - `clip_low`."""
    clip_high: Annotated[float, Field(gt=0)] = 0.28
    """The ratio is clipped above 1 + `clip_high`."""
    dual_clip: Annotated[float, Field(gt=1)] = 3.0
    """For the loss `dual_clip`: largest ratio of a token with negative advantage."""
    reduction: Literal["token_mean", "trajectory_mean", "prompt_mean", "seq_mean_token_sum_norm", "sequence_mean"] = (
        "token_mean"
    )
    norm_tokens: Positive | None = None
    """The divisor, in tokens, of `seq_mean_token_sum_norm`; None: max_input_length + max_generate_length."""
    anchor: Literal["rollout", "proximal"] = "rollout"
    """Denominator of the clipped ratio: the log-probabilities of the rollout, or of frozen weights."""
    anchor_every: Positive = 1
    """Optimizer steps between two renewals of the frozen weights of `anchor: proximal`."""
    correction: CorrectionConfig = CorrectionConfig()
    entropy_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the entropy bonus."""
    kl_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL term; 0: there is no reference policy."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    reference: ReferenceConfig = ReferenceConfig()
    teacher: TeacherConfig | None = None


class TrainerConfig(Section):
    """The FSDP trainer group."""

    ranks: Count = 2
    """Processes of the group, each with a GPU if there are any."""
    mini_batch_size: Count = 16
    """Groups of one optimizer step."""
    max_tokens_per_micro_batch: Annotated[int, Field(gt=0, le=1 << 24)] = 16384
    """Token budget of one forward pass on one rank."""
    sequence_parallel: Count = 1
    """Ranks that share each micro-batch, each with an equal part of its tokens, so that a row may have this many times
    the tokens of a rank's budget. It must divide `ranks` and the model's heads; see docs/learning.md."""
    expert_parallel: Count = 1
    """Ranks of a node that divide the experts of each layer, and send each other their tokens; 1: every rank gathers
    all experts. It must divide the ranks of each node and the model's experts; see docs/learning.md."""
    layout: Literal["auto", "packed", "padded", "shared_prefix"] = "auto"
    """`packed`: rows one after another; `padded`: left-padded rows; `shared_prefix`: packed, and a prefix that
    several rows share is computed once, so that the token budget counts distinct tokens; `auto`: `shared_prefix` for
    mini-batches in which it saves a tenth of the tokens, else `packed`."""
    lr: Annotated[float, Field(gt=0)] = 1e-6
    warmup_steps: NotNegative = 0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """The learning rate from the end of the warm-up until `run.max_steps`."""
    min_lr_fraction: Fraction = 0.0
    """Fraction of `lr` at which `linear` and `cosine` end."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    gradient_checkpointing: bool | Annotated[int, Field(ge=2, le=MOST)] | Literal["auto"] = "auto"
    """Keep only the inputs of the layers, and recompute the other activations in the backward pass. A number n: do so
    in every n-th layer only, which takes more memory and less time. auto: on a GPU, for bfloat16 models, as few layers
    as the estimate of memory allows; on a CPU none. After a step that ran out of memory, more layers are recomputed."""
    shard_within: Literal["all", "node"] = "all"
    """Shard the policy over all ranks (`all`), or over the ranks of each node (`node`): then nodes send each other only
    gradients, and each rank holds a larger part of weights, gradients and optimizer state."""
    reshard_after_forward: bool | Literal["auto"] = "auto"
    """Free the gathered weights of the layers after the forward pass and gather them again for the backward pass, which
    sends more and takes less memory. auto: on a GPU, for bfloat16 models, the gathered weights are kept if 15 % of
    the GPU's memory still stays free; on a CPU they are freed."""
    shard_one_rank: bool = False
    """Shard even with a single rank, as with several ranks, so that sharded training can be measured on one GPU."""
    cpu_offload: bool = False
    """Keep weights, gradients and optimizer state in CPU memory."""
    compile: bool | None = None
    """Compile the decoder layers: the first steps take minutes, later ones take less time and memory. None: on a GPU
    where the compiler works, for bfloat16 models. Experts run uncompiled inside the layers."""
    fused_kernels: bool = False
    """Use Liger kernels for norms, rotary embeddings and MLPs; needs the package liger-kernel and a GPU."""
    checkpoint_every: NotNegative = 0
    """Optimizer steps between checkpoints; 0: only the final weights are written."""
    keep_checkpoints: Positive = 2
    start_deadline: Seconds = 600.0
    """Seconds within which the ranks must restart after a failure. If layers are compiled, this is also the deadline of
    a collective of the first step, since ranks then wait for each other's compilers."""
    max_bad_steps: Positive = 10
    """Optimizer steps in a row that are skipped, for example because the loss is not finite, before the run fails."""
    accelerator: str | None = None
    """Ray accelerator type of the ranks' nodes, such as H100."""
    collective_deadline: Seconds = 120.0
    """Seconds within which one collective must end; for the first step of compiled layers see `start_deadline`."""

    @property
    def sharded(self) -> bool:
        """Whether the ranks form a process group and shard the policy."""
        return self.ranks > 1 or self.shard_one_rank

    @property
    def keeps_gathered(self) -> bool:
        """Whether gathered weights are kept for the backward pass if there is memory for them."""
        return self.sharded and self.reshard_after_forward == "auto"

    @property
    def batch_parts(self) -> int:
        """Number of parts of a mini-batch: one for each group of ranks that share micro-batches."""
        return self.ranks // self.sequence_parallel

    @property
    def tokens_of_micro_batch(self) -> int:
        """Token budget of a micro-batch, summed over all ranks that share it."""
        return self.max_tokens_per_micro_batch * self.sequence_parallel


class WeightsConfig(Section):
    """Publication of new weights to the engines."""

    sync_every: Positive = 1
    """Optimizer steps between two updates of the engines."""
    transport: Literal["memory", "ipc"] = "memory"
    """`memory`: engines read the ranks' parts of the weights in shared memory; engines on other hosts read a copy that
    NIXL reads from there over RDMA, or, without NIXL or RDMA, that Ray's object store transfers, with checksums. `ipc`:
    by CUDA IPC on a GPU that a rank and an engine share, so that `generator.gpu_memory_utilization` must leave room for
    the rank. On one H100 `ipc` ran the quick start, and the copies of `memory` and an engine's pause were measured;
    NIXL has run on CPUs only."""
    kv_cache: Literal["recompute", "keep"] = "recompute"
    """The KV cache of running requests at an update: recomputed with the new weights, or kept."""
    sync_deadline: Seconds = 300.0
    """Seconds within which an update of an engine must end."""
    verify: bool = False
    """Fail if engine and trainer disagree, in several steps in a row, on the log-probabilities of more than a tenth of
    the tokens that the newest policy sampled."""
    verify_tolerance: Annotated[float, Field(gt=0)] = 1e-3
    """Nats by which the two log-probabilities of a token may differ; bfloat16 needs 0.1, float32 on a GPU 0.01."""
