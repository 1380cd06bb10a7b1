"""Settings of the algorithm, the trainer and the publication of weights."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from service.config.section import MOST, Band, Count, Decay, Fraction, NotNegative, Positive, Seconds, Section


class CorrectionConfig(Section):
    """Off-policy correction for tokens that were sampled by another policy than the trained one; see docs/learning.md.

    A token's ratio is its probability under the anchor divided by its probability under the rollout policy. With
    `anchor: rollout`, the trained policy takes the place of the anchor. A masked token has no loss, but counts in the
    denominator of the loss.
    """

    truncate: Literal["off", "token", "sequence"] = "off"
    """Multiply the loss of a token by a ratio that is truncated at `truncate_at` (TIS). `token`: the ratio of the
    token; `sequence`: the product of all ratios of its trajectory; `off`: no factor."""
    truncate_at: Annotated[float, Field(gt=0)] = 2.0
    """Upper bound of the ratio by which `truncate` multiplies."""
    token_band: Band | None = None
    """Mask tokens whose ratio is outside the band (IcePop; with a lower end of 0: masked importance sampling)."""
    sequence_band: Band | None = None
    """Mask trajectories if the product of their ratios is outside the band."""
    geometric_band: Band | None = None
    """Mask trajectories if the geometric mean of their ratios is outside the band."""
    outlier_band: Band | None = None
    """Mask trajectories if the ratio of any of their tokens is outside the band."""

    @property
    def is_on(self) -> bool:
        """True if the correction truncates or masks anything."""
        bands = (self.token_band, self.sequence_band, self.geometric_band, self.outlier_band)
        return self.truncate != "off" or any(band is not None for band in bands)


class ReferenceConfig(Section):
    """The reference policy of the KL term: a copy of the policy's weights, taken when RL begins."""

    refresh_every: NotNegative = 0
    """Optimizer steps after which the copy is taken again from the current weights; 0: never."""
    on_cpu: bool = False
    """Keep each rank's shard of the copy in CPU memory, except while a forward pass uses it."""


class TeacherConfig(Section):
    """On-policy distillation: a term of the loss that pulls the policy towards a teacher; see docs/scorers.md."""

    coef: Annotated[float, Field(gt=0)] = 1.0
    """Weight of the teacher's term."""
    mode: Literal["advantage", "kl"] = "advantage"
    """`advantage`: `coef` times the log-ratio of teacher to rollout is added to each token's advantage; `kl`: `coef`
    times the KL divergence from the teacher (estimated as `kl_estimator` says) is added to the loss."""
    column: str | None = None
    """Column of the dataset that has the name of each row's teacher; rows may have none. None: the only teacher is used
    for all rows."""


class AlgorithmConfig(Section):
    """How the loss is computed from rewards."""

    estimator: str = "grpo"
    """Advantage estimator: grpo, grpo_no_std, rloo, maxrl, reinforce++_baseline; or
    `your.module:name`."""
    n_samples_per_prompt: Count = 8
    """Number of trajectories in a group."""
    returns: Literal["last", "sum"] = "last"
    """What the return of a trajectory is: the reward at its end (last), or the sum of the rewards of its steps
    (sum)."""
    credit: Literal["trajectory", "return_to_go"] = "trajectory"
    """Rewards from which the advantage of a turn is computed: the return of the whole trajectory (trajectory), or the
    rewards from this turn on (return_to_go, credit by turn; needs `returns: sum`). See docs/credit.md."""
    filter_zero_variance: bool = False
    """Filter groups whose returns are all equal; with credit by turn, groups whose advantages are all 0. Filtered
    groups are not trained, and other groups take their place."""
    filter_over_long: Fraction | None = None
    """Filter groups if more than this fraction of their trajectories ended at a length limit (stop reason `length` or
    `truncated`); None: off."""
    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Discount factor per turn, with credit by turn."""
    loss: str = "ppo_clip"
    """Policy loss: ppo_clip, dual_clip, cispo, gspo, rollout_is, importance_sampling, cross_entropy, or
    `your.module:name`."""
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """The ratio is clipped where it is below 1 - `clip_low`."""
    clip_high: Annotated[float, Field(gt=0)] = 0.28
    """The ratio is clipped where it is above 1 + `clip_high`."""
    dual_clip: Annotated[float, Field(gt=1)] = 3.0
    """For the loss `dual_clip`: upper bound of the ratio of a token with a negative advantage."""
    reduction: Literal["token_mean", "trajectory_mean", "prompt_mean", "seq_mean_token_sum_norm"] = "token_mean"
    norm_tokens: Positive | None = None
    """For `reduction: seq_mean_token_sum_norm`: the divisor, in tokens; None: max_input_length +
    max_generate_length."""
    anchor: Literal["rollout", "proximal"] = "rollout"
    """Policy in the denominator of the clipped ratio: the policy that sampled the token (`rollout`), or frozen weights
    (`proximal`)."""
    anchor_every: Positive = 1
    """For `anchor: proximal`: optimizer steps after which the frozen weights are taken again from the current
    weights."""
    correction: CorrectionConfig = CorrectionConfig()
    entropy_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the entropy bonus."""
    kl_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL term; 0: no KL term, and no reference policy."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    reference: ReferenceConfig = ReferenceConfig()
    teacher: TeacherConfig | None = None


class TrainerConfig(Section):
    """The trainer: a group of ranks that trains with FSDP."""

    ranks: Count = 2
    """Number of processes that train together, each with its own GPU if there are GPUs."""
    mini_batch_size: Count = 16
    """Number of groups in a mini-batch, which is one optimizer step."""
    max_tokens_per_micro_batch: Annotated[int, Field(gt=0, le=1 << 24)] = 16384
    """Maximum tokens of one forward pass on one rank."""
    sequence_parallel: Count = 1
    """Number of ranks that share each micro-batch; each has an equal part of its tokens, so a row may be this many
    times longer than one rank's token budget. Must divide `ranks` and the model's heads; see docs/learning.md."""
    layout: Literal["auto", "packed", "padded", "shared_prefix"] = "auto"
    """`packed`: rows one after another; `padded`: rows padded on the left; `shared_prefix`: packed, but a prefix that
    several rows share is computed once and counts once in the token budget; `auto`: `shared_prefix` for mini-batches in
    which it saves at least a tenth of the tokens, else `packed`."""
    lr: Annotated[float, Field(gt=0)] = 1e-6
    warmup_steps: NotNegative = 0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate from the end of the warm-up until `run.max_steps`."""
    min_lr_fraction: Fraction = 0.0
    """For `linear` and `cosine`: final learning rate, as a fraction of `lr`."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    gradient_checkpointing: bool | Annotated[int, Field(ge=2, le=MOST)] | Literal["auto"] = "auto"
    """Keep only the inputs of layers, and compute the other activations again in the backward pass. true: in all
    layers; a number n: only in every n-th layer, which takes more memory and less time; auto: in no layer. If the
    largest micro-batch, which ranks with GPUs try when they load, or a step runs out of memory, the ranks restart with
    the next level: half of the layers, then all layers."""
    shard_within: Literal["all", "node"] = "all"
    """Shard the policy over all ranks (`all`), or over the ranks of each node (`node`). With `node`, nodes send each
    other only gradients, but each rank has a larger part of weights, gradients and optimizer state."""
    reshard_after_forward: bool | Literal["auto"] = "auto"
    """true: free the gathered weights of layers after the forward pass and gather them again for the backward pass,
    which sends more bytes and takes less memory. auto: keep the gathered weights if at least 15 % of the GPU's memory
    stays free in the trial of the largest micro-batch, else free them."""
    cpu_offload: bool = False
    """Keep weights, gradients and optimizer state in CPU memory."""
    compile: bool | None = None
    """Compile the decoder layers. The start then takes minutes longer; steps take less time and memory. None:
    compile bfloat16 models on a GPU where the compiler works. Experts always run uncompiled."""
    fused_kernels: bool = False
    """Use Liger kernels for norms, rotary embeddings and MLPs; needs the package liger-kernel and a GPU."""
    checkpoint_every: NotNegative = 0
    """Optimizer steps from one checkpoint to the next; 0: no checkpoints, only the final weights."""
    keep_checkpoints: Positive = 2
    start_deadline: Seconds = 600.0
    """Seconds in which the ranks must start: load the model, compile its layers and try the largest micro-batch. Until
    then it is also the deadline of each collective."""
    accelerator: str | None = None
    """Ray's accelerator type of the nodes for the ranks, such as H100."""
    profile_steps: Annotated[int, Field(ge=0, le=20)] = 0
    """Number of optimizer steps, from the fourth on, of which rank 0 writes a torch profile to `profiles/`."""
    collective_deadline: Seconds = 120.0
    """Seconds in which a collective of a step must end; while ranks start, see `start_deadline`."""

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
    """`memory`: engines read the weights from shared memory of the ranks; engines on other hosts read a copy, which
    NIXL fetches over RDMA or else Ray's object store transfers, with checksums. `ipc`: by CUDA IPC on a GPU that a rank
    and an engine share; `generator.gpu_memory_utilization` must leave memory for the rank. Tested so far: `ipc` on one
    H100; of `memory`, the copies and the engine's pause on an H100; NIXL only on CPUs."""
    kv_cache: Literal["recompute", "keep"] = "recompute"
    """What an update does with the KV cache of running requests: compute it again with the new weights, or keep it."""
    sync_deadline: Seconds = 300.0
    """Seconds in which an engine must have loaded new weights."""
    verify: bool = False
    """Let the run fail if engine and trainer give different log-probabilities to more than a tenth of the tokens that
    the newest policy sampled, in several successive steps."""
    verify_tolerance: Annotated[float, Field(gt=0)] = 1e-3
    """Difference in nats above which two log-probabilities of a token count as different; set 0.1 for bfloat16, 0.01
    for float32 on a GPU."""
