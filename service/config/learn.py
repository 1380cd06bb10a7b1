"""Settings of what is learned, and of the weights' way back."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from service.config.section import Decay, NotNegative, Positive, Seconds, Section, Share

Band = tuple[Annotated[float, Field(ge=0)], Annotated[float, Field(gt=0)]]


class CorrectionConfig(Section):
    """What is done about tokens that another policy than the trained one sampled; see docs/learning.md.

    Ratios are the anchor's probability over the rollout's (with `anchor: rollout`, the trained policy's).
    A masked token contributes nothing and still counts in the loss's denominator.
    """

    truncate: Literal["off", "token", "sequence"] = "off"
    """Multiply the loss by the ratio of the token, or of the whole trajectory, cut off at `truncate_at` (TIS)."""
    truncate_at: Annotated[float, Field(gt=0)] = 2.0
    token_band: Band | None = None
    """Mask tokens whose ratio lies outside (IcePop; with a lower end of 0, MIS)."""
    sequence_band: Band | None = None
    """Mask trajectories whose product of ratios lies outside."""
    geometric_band: Band | None = None
    """Mask trajectories whose geometric mean of ratios lies outside."""
    outlier_band: Band | None = None
    """Mask trajectories of which any single token's ratio lies outside."""


class ReferenceConfig(Section):
    """The policy that a KL term holds the trained one near: a copy of its own weights, as they were when RL began."""

    refresh_every: NotNegative = 0
    """Optimizer steps after which the copy is taken anew; 0: never."""
    on_cpu: bool = False
    """Keep this rank's shard of the copy in CPU memory, and bring it to the device for its forward pass only."""


class AlgorithmConfig(Section):
    """From rewards to a loss."""

    step_wise: bool = True
    """Turns are steps, which `buffer.merge` makes rows of; false: a trajectory is one sequence, observations included
    with mask 0."""
    estimator: str = "grpo"
    """grpo, grpo_no_std, rloo, maxrl, reinforce++_baseline; reinforce++ (not step-wise), or `your.module:name`."""
    n_samples_per_prompt: Positive = 8
    returns: Literal["last", "sum"] = "last"
    filter_zero_variance: bool = False
    """Groups whose returns are all equal vacate their slot instead of being trained."""
    filter_over_long: Share | None = None
    """So do groups of whose trajectories more than this share ended at the length limit; None: none do."""
    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Discount per sampled token, for `reinforce++`."""
    loss: str = "ppo_clip"
    """ppo_clip, dual_clip, cispo, gspo, rollout_is, importance_sampling, cross_entropy, or `your.module:name`."""
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """The ratio is clipped below 1 - clip_low ..."""
    clip_high: Annotated[float, Field(gt=0)] = 0.28
    """... and above 1 + clip_high."""
    dual_clip: Annotated[float, Field(gt=1)] = 3.0
    """Loss `dual_clip`: the ratio that bounds the loss of a token with negative advantage."""
    reduction: Literal["token_mean", "trajectory_mean", "prompt_mean", "seq_mean_token_sum_norm", "sequence_mean"] = (
        "token_mean"
    )
    norm_tokens: Positive | None = None
    """Constant of `seq_mean_token_sum_norm`; None: max_input_length + max_generate_length."""
    anchor: Literal["rollout", "proximal"] = "rollout"
    """What the clipped ratio is taken against: the log-probabilities of the rollout, or those of frozen weights."""
    anchor_every: Positive = 1
    """Optimizer steps after which the frozen weights of `anchor: proximal` are taken anew."""
    correction: CorrectionConfig = CorrectionConfig()
    entropy_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the entropy bonus."""
    kl_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL term against the reference; 0: there is no reference."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    reference: ReferenceConfig = ReferenceConfig()


class TrainerConfig(Section):
    """The FSDP group."""

    ranks: Positive = 2
    mini_batch_size: Positive = 16
    """Groups of one optimizer step."""
    max_tokens_per_micro_batch: Positive = 16384
    """Token budget of one forward pass on one rank."""
    layout: Literal["packed", "padded"] = "packed"
    lr: Annotated[float, Field(gt=0)] = 1e-6
    warmup_steps: NotNegative = 0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """What the learning rate does after the warm-up, until `run.max_steps`."""
    min_lr_fraction: Share = 0.0
    """Share of `lr` at which `linear` and `cosine` end."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    gradient_checkpointing: bool = False
    """Keep only the layers' inputs, and compute the rest again in the backward pass."""
    cpu_offload: bool = False
    """Keep weights, gradients and optimizer state in CPU memory."""
    compile: bool = False
    """Compile the decoder layers: the first steps take minutes, the others less time and memory."""
    fused_kernels: bool = False
    """Use Liger kernels for norms, rotary embeddings and MLPs; needs the package liger-kernel and a GPU."""
    checkpoint_every: NotNegative = 0
    """Optimizer steps between checkpoints; 0: only the final weights are written."""
    keep_checkpoints: Positive = 2
    start_deadline: Seconds = 600.0
    """Seconds that the ranks may take to come back after a failure."""
    max_bad_steps: Positive = 10
    """Aborted optimizer steps in a row after which the run ends with the reason."""
    accelerator: str | None = None
    """Ray accelerator type of the ranks' nodes, such as H100."""
    collective_deadline: Seconds = 120.0
    """Seconds that one collective may take."""


class WeightsConfig(Section):
    """The weights' way back to the engines."""

    sync_every: Positive = 1
    """Optimizer steps between two updates of the engines."""
    transport: Literal["memory", "nccl", "ipc"] = "memory"
    """`memory`: through Ray's object store and a file in shared memory, with a checksum; `nccl`: from the trainer's
    first GPU to each engine's; `ipc`: within a GPU that a rank and an engine share, by CUDA IPC, for which
    `generator.gpu_memory_utilization` has to leave room for the rank. The latter two have not run on any GPU yet."""
    kv_cache: Literal["recompute", "keep"] = "recompute"
    """What becomes of the running requests' KV cache at an update."""
    sync_deadline: Seconds = 300.0
    verify: bool = False
    """End the run when engine and trainer disagree about tokens that the newest policy sampled."""
    verify_tolerance: Annotated[float, Field(gt=0)] = 1e-3
    """Nats by which a token's two log-probabilities may differ, root mean square; bfloat16 needs about 0.1."""
