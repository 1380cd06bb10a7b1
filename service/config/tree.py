"""The one configuration tree: strict, frozen, every field with its meaning and unit."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from service.config.learn import AlgorithmConfig, TrainerConfig, WeightsConfig
from service.config.rollout import DataConfig, EnvConfig, GeneratorConfig
from service.config.section import MergeMode, NotNegative, Positive, Seconds, Section, Share


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
    stop_grace: Seconds = 600.0
    """Seconds from a stop signal until the run is ended by force; before that it finishes its optimizer step and writes
    the final weights."""
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
    right_fraction: Share = 0.15
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
    """Bytes of one group, in equal parts for its trajectories; a message beyond its trajectory's part is refused."""
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
