"""The one configuration tree: strict, frozen, every field with its meaning and unit."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(gt=0)]
NotNegative = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
MergeMode = Literal["off", "linear", "tree"]
Decay = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """A part of the tree: unknown keys are refused, values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


class RunConfig(Section):
    """The run as a whole."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "run"
    """Name of the run and of its folder."""
    dir: Path = Path("runs")
    """Folder that holds the run folders; must outlast the process (a Ray job's working directory does not)."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of everything random in the run."""
    max_steps: Positive = 100
    """Optimizer steps after which the run ends."""
    max_restarts: NotNegative = 3
    """Failures of a generator, or of the trainer, without an optimizer step in between that a run survives."""
    trajectories_per_step: NotNegative = 2
    """Trajectories of each mini-batch, and as many again of groups that ended without being trained, that are kept in
    `trajectories.jsonl`, until that file is full."""
    insecure_local: bool = False
    """Run on a Ray without authentication; only for a machine that nobody else reaches."""
    stop_grace: Seconds = 20.0
    """Seconds that a stopped run may take to write its final weights."""
    stall_deadline: Seconds = 600.0
    """Seconds without an optimizer step after which the run ends with the reason."""


class MakeModelConfig(Section):
    """The shape of a small Qwen3 model that the run makes itself, with a tokenizer for the environment's words."""

    hidden_size: Annotated[int, Field(gt=0, le=4096)] = 128
    intermediate_size: Annotated[int, Field(gt=0, le=16384)] = 256
    num_layers: Annotated[int, Field(gt=0, le=64)] = 2
    num_heads: Annotated[int, Field(gt=0, le=64)] = 4
    num_kv_heads: Annotated[int, Field(gt=0, le=64)] = 2
    head_dim: Annotated[int, Field(gt=0, le=256)] = 32


class WarmStartConfig(Section):
    """Supervised steps on the environment's demonstrations before RL begins."""

    steps: Positive = 300
    batch_size: Positive = 64
    lr: Annotated[float, Field(gt=0)] = 2e-3
    right_share: Share = 0.15
    """Share of demonstrations that solve the task; the others show bad habits."""
    demonstrations: Positive = 4096
    """Demonstrations that are made to choose from."""
    probe_prompts: NotNegative = 64
    """Prompts on which the success after the warm start is measured."""
    expected_success: tuple[Share, Share] = (0.15, 0.25)
    """Success between which the warm start must end: above it little is left to learn, below it nothing to build on."""


class ModelConfig(Section):
    """The policy."""

    path: Path | None = None
    """A Hugging Face folder (config, safetensors, tokenizer, chat template)."""
    make: MakeModelConfig | None = None
    """Make a small model instead of reading `path`."""
    warm_start: WarmStartConfig | None = None
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of the parameters in forward passes, in engine and trainer."""


class MixturePart(Section):
    """One dataset of a mixture."""

    path: Path
    """A JSONL or parquet file with a row a prompt."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """The dataset's share of all prompts is its weight over the sum of weights."""


class DataConfig(Section):
    """Where prompts come from."""

    train: Path | None = None
    """A JSONL or parquet file with a row a prompt."""
    make_rows: Positive | None = None
    """Make this many rows with the environment's own generator instead of reading `train`."""
    mixture: dict[str, MixturePart] = {}
    """Several datasets by name, in the proportions of their weights, instead of `train`; an epoch has each row at least
    once."""
    eval: dict[str, Path] = {}
    """Evaluation sets by name: JSONL or parquet files."""
    eval_make_rows: Positive | None = None
    """Make an evaluation set `made` of this many rows with the environment's own generator."""
    eval_every: NotNegative = 0
    """Optimizer steps between evaluations; 0: none while training."""
    eval_samples: Positive = 1
    """Trajectories of each evaluation prompt."""
    eval_temperature: Annotated[float, Field(ge=0)] | None = None
    """Sampling temperature of evaluations, 0 for the likeliest tokens; None: the prompt's, as in training."""
    eval_deadline: Seconds = 3600.0
    """Seconds after which an evaluation is given up, and the run goes on without it."""
    shuffle: bool = True
    """Shuffle each epoch with the run's seed."""


class RetrievalConfig(Section):
    """A retrieval server, as an actor of the run; `POST /retrieve` as Search-R1's and SkyRL's environments ask it."""

    corpus: Path | None = None
    """JSONL with `id` and `contents` in each row; None: the small corpus that comes with Baton."""
    encoder: Path | None = None
    """A Hugging Face folder of a dense encoder; None: passages are found by the words that they share."""
    embeddings: Path | None = None
    """The corpus's vectors (.npy), written where they are missing; without it they are computed at every start."""
    query_prefix: str = ""
    """Before each question, such as `query: ` for E5."""
    passage_prefix: str = ""
    """Before each passage, such as `passage: ` for E5."""
    gpus: Annotated[float, Field(ge=0)] = 0.0
    """GPUs of the encoder, or the share of one; 0: it runs on the CPU."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """0 takes a free one; a server that dies comes back where the environments look for it only on a fixed one."""
    start_deadline: Seconds = 1800.0
    """Seconds that reading and encoding the corpus may take."""


class EnvConfig(Section):
    """The environment that answers the policy."""

    name: str = "lookup"
    """Name of the environment, as registered."""
    max_turns: Positive = 4
    step_deadline: Seconds = 60.0
    """Seconds that one call of the environment may take."""
    options: dict[str, str | int | float | bool] = {}
    """Passed to the environment's constructor."""
    class_options: dict[str, dict[str, str | int | float | bool]] = {}
    """The same for other environments that rows name in `env_class`, by that name."""
    trusted_modules: tuple[str, ...] = ()
    """Modules, with what lies under them, whose classes `name` and `env_class` may mean as `module:Class`."""
    isolation: Literal["none", "process"] = "none"
    """`process`: every open episode has a process of its own, which is ended where it blocks."""
    max_processes: Positive = 256
    """Processes that one generator has open at once, at most; further episodes wait for one to end."""
    max_observation_characters: Positive = 1 << 20
    """Characters of one observation; an environment that says more loses its trajectory."""
    retrieval: RetrievalConfig | None = None
    """Start a retrieval server, whose address becomes the option `url` of the environment `name`."""


class GeneratorConfig(Section):
    """vLLM engines and the agent loops beside them."""

    engines: Positive = 1
    """Generator actors, one engine each."""
    tensor_parallel_size: Positive = 1
    """GPUs of one engine."""
    concurrent_groups: Positive = 32
    """Groups that all engines together generate at once."""
    max_input_length: Positive = 1024
    """Tokens of a turn's prompt, at most."""
    max_generate_length: Positive = 256
    """Tokens of a turn's response, at most."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    top_p: Share = 1.0
    top_k: int = -1
    min_p: Share = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: tuple[str, ...] = ()
    """Stop strings; an end-of-sequence token is appended, with mask 0, where one of them ended the turn."""
    conversation: Literal["append", "rerender", "inline"] = "append"
    """How a turn follows another: as messages after an unchanged history, by rendering the whole conversation anew
    (rows fork where the template rewrites it), or as bare text inside one message of the assistant."""
    chat_template_options: dict[str, str | int | float | bool] = {}
    """Passed to the chat template, such as `enable_thinking: false`."""
    kv_cache_bytes: Positive | None = None
    """Bytes of KV cache of one engine; None lets a GPU engine use `gpu_memory_utilization`."""
    gpu_memory_utilization: Share = 0.85
    enforce_eager: bool = False
    """Skip compilation and CUDA graphs."""
    start_deadline: Seconds = 600.0
    """Seconds that an engine may take to start."""
    request_deadline: Seconds = 300.0
    """Seconds that one turn may take in the engine."""
    silent_deadline: Seconds = 60.0
    """Seconds without an answer after which a generator is taken for frozen, and starts again."""


class BufferConfig(Section):
    """Admission, staleness, deadlines, bounds."""

    lookahead: NotNegative | Literal["auto"] = 2
    """Mini-batches that may be open beyond the one that the serving version trains; 0 is strictly on-policy;
    auto: the smallest number that keeps the trainer's waiting under a twentieth, at most `max_staleness`."""
    max_staleness: NotNegative = 8
    """Versions after which a token carries no loss."""
    order: Literal["finished_first", "strict"] = "finished_first"
    step_deadline: Seconds = 300.0
    """Seconds without progress after which a trajectory starts anew as its next attempt."""
    max_attempts: Positive = 3
    """Of a trajectory. One that only fails is then lost alone; one whose generators died or fell silent takes its group
    with it."""
    on_group_deadline: Literal["train_partial", "expire"] | None = None
    """What becomes of a group at its deadline: its finished trajectories are trained, or none; None: it has none."""
    group_deadline: Seconds = 3600.0
    """Seconds from a group's claim to its deadline."""
    lease_deadline: Seconds = 1800.0
    max_lease_attempts: Positive = 3
    max_bytes: Positive = 4 << 30
    """Bytes of admitted groups at worst, in memory."""
    max_group_bytes: Positive = 256 << 20
    max_journal_bytes: Positive = 64 << 30
    record: bool = False
    """Keep what the journal no longer needs, so that every mini-batch can be formed again from it."""
    sync_interval: Seconds = 0.005
    """Seconds between two syncs of the journal while something is queued."""
    merge: MergeMode = "linear"
    """Which steps share a row: none, those that continue the step before, or those that continue any earlier row."""
    drift: Literal["fork", "realign"] = "fork"
    """A prompt that repeats its row but for a short mismatch: a new row, or the same, without loss on what differs."""
    max_drift_tokens: NotNegative = 16
    """Tokens of a mismatch that `drift: realign` bridges, at most."""


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
    kl_in_reward: bool = False
    """Always false: KL is a term of the loss here, and what takes it from the reward is refused."""
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
    min_lr_share: Share = 0.0
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


class WandbConfig(Section):
    """Weights & Biases, besides `metrics.jsonl` and TensorBoard; needs the package wandb."""

    project: str = "baton"
    offline: bool = True
    """Write to the run folder only; `wandb sync` sends it when you want it to."""


class MetricsConfig(Section):
    """Where Prometheus finds the run."""

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 9400
    """Port of /metrics and /status; 0 takes a free one."""
    long_batch_tokens: Positive | None = None
    """Padded length above which the alert counts a mini-batch as long; None: three quarters of the longest row."""
    wandb: WandbConfig | None = None


class Config(Section):
    """Everything a run can be told."""

    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    env: EnvConfig = EnvConfig()
    generator: GeneratorConfig = GeneratorConfig()
    buffer: BufferConfig = BufferConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    trainer: TrainerConfig = TrainerConfig()
    weights: WeightsConfig = WeightsConfig()
    metrics: MetricsConfig = MetricsConfig()

    @property
    def merge_mode(self) -> MergeMode:
        """How the steps of a trajectory become rows: as `buffer.merge` says, or all of them one where not step-wise."""
        return self.buffer.merge if self.algorithm.step_wise else "linear"
