"""The configuration tree: all sections and settings of a run, each with its meaning and unit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from service.config.learn import AlgorithmConfig, LoraConfig, TrainerConfig, WeightsConfig
from service.config.rollout import AGENT, AgentsConfig, DataConfig, EnvConfig, GeneratorConfig, RoleConfig, ScorerConfig
from service.config.section import (
    FOLDER_NAME,
    LARGEST_HOST,
    SCORE,
    Fraction,
    MergeMode,
    Name,
    Named,
    NotNegative,
    Positive,
    Seconds,
    Section,
    UserPath,
    Versions,
)
from service.handoff.steps.values import MAX_NAMED, TRAINED

_VALUE = r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
_NAME = re.compile(rf"([a-z0-9]([a-z0-9.-]{{0,251}}[a-z0-9])?/)?{_VALUE}")
_CHOICE = re.compile(rf"!?({_VALUE}|in\({_VALUE}(, ?{_VALUE})*\))")

SHORT_ANSWER = 16
"""A length limit below this number of tokens cuts off most answers of a pretrained model."""

HEAD_DIM = 32
"""Dimensions of a head of the models that runs make."""

MARKET = "ray.io/market-type"
"""Ray's label for the kind of a host. The cloud may take away a host with the value `spot` at short notice."""


def _label(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError(f"must be the name of a label, such as {MARKET}")
    return name


def _choice(text: str) -> str:
    if not _CHOICE.fullmatch(text):
        raise ValueError("must be a value, !value, in(one, other) or !in(one, other)")
    return text.replace(" ", "")  # Ray would take a space as part of a value


Labels = dict[Annotated[str, AfterValidator(_label)], Annotated[str, AfterValidator(_choice)]]
"""A label selector of Ray: for each label, the value that a host must have."""


class RunConfig(Section):
    """Settings of the run as a whole."""

    name: Annotated[str, Field(pattern=FOLDER_NAME, max_length=200)] = "run"
    """Name of the run, and of its folder."""
    dir: UserPath = Path("runs")
    """Folder in which run folders are made. It must outlast the process; a Ray job's working directory does not."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of all random numbers of the run."""
    max_steps: Annotated[int, Field(gt=0, lt=1 << 31)] = 100
    """Optimizer steps after which the run ends."""
    max_restarts: NotNegative = 3
    """Failures of a generator or the trainer that a run survives between two new (not repeated) optimizer steps."""
    trajectories_per_step: NotNegative = 2
    """Trajectories that `trajectories.jsonl` records for each mini-batch, and as many untrained ones, until it is
    full."""
    keep_best: Annotated[str, Field(pattern=SCORE)] | None = None
    """Score of an evaluation set, such as `eval/made/avg_score`; the weights with the highest score are kept in
    `best/`."""
    stop_grace: Seconds = 600.0
    """Seconds in which a stopped run must finish its step and write the final weights; then it is killed."""
    start_deadline: Seconds = 600.0
    """Seconds in which the cluster must have room; then again, in which ranks must load, compile and try the largest
    micro-batch, and engines and scorers must start."""
    stall_deadline: Seconds = 600.0
    """Seconds without a mini-batch after which the run fails."""
    store: str | None = None
    """Address of an object store, such as `s3://bucket/run`, to which checkpoints and final weights are uploaded; needs
    the package obstore. Credentials come from environment variables."""


class MakeModelConfig(Section):
    """A small Qwen3 model with random weights, which the run makes with a tokenizer for its environment."""

    hidden_size: Annotated[int, Field(gt=0, le=4096, multiple_of=64)] = 128
    """Width of the layers. Heads have 32 dimensions, two heads share keys; MLPs are twice as wide."""
    num_layers: Annotated[int, Field(gt=0, le=64)] = 2
    """Decoder layers."""

    @property
    def dimensions(self) -> dict[str, int]:
        """The dimensions of the model, by their names in config.json."""
        heads = self.hidden_size // HEAD_DIM
        return {
            "hidden_size": self.hidden_size,
            "intermediate_size": 2 * self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads // 2,
            "head_dim": HEAD_DIM,
        }


class WarmStartConfig(Section):
    """Supervised training on the environment's demonstrations before RL begins."""

    steps: Positive = 300
    """Supervised steps."""
    batch_size: Positive = 64
    """Demonstrations of a step."""
    lr: Annotated[float, Field(gt=0)] = 2e-3
    """Highest learning rate: it rises over the first tenth of the steps, and falls to 0."""
    right_fraction: Fraction = 0.15
    """Fraction of the demonstrations that solve the task; the others show mistakes."""
    demonstrations: Positive = 4096
    """Demonstrations that are made; each batch is a random sample."""


class ModelConfig(Section):
    """The model of the policy."""

    path: Annotated[UserPath, Named("model folder", "folder", "give a Hugging Face folder")] | None = None
    """A Hugging Face folder (config, safetensors, tokenizer, chat template), or `hf:org/name@revision`."""
    make: MakeModelConfig | None = None
    """A small model with random weights, in place of `path`."""
    warm_start: WarmStartConfig | None = None
    """Supervised training before RL. It trains all weights, even if `lora` is set; the adapter is then added to the
    warm-started model."""
    lora: LoraConfig | None = None
    """Train a low-rank adapter and keep the model's weights unchanged; None: train all weights."""
    adapter: Annotated[UserPath, Named("adapter", "folder", "give a folder with adapter_config.json")] | None = None
    """Folder of an adapter in PEFT's form with which training starts; it must match `lora`."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Data type of the parameters in forward passes of engine and trainer."""


class BufferConfig(Section):
    """The buffer: admission of groups, staleness, deadlines, and limits of memory and disk."""

    lookahead: Versions = 2
    """Mini-batches that generators may begin ahead of the policy version that they serve; 0: strictly on-policy."""
    max_staleness: Versions = 8
    """Largest staleness, in versions, with which a token carries loss."""
    order: Literal["finished_first", "strict"] = "finished_first"
    """Groups of a mini-batch: those that became complete first (`finished_first`), or were issued first (`strict`)."""
    step_deadline: Seconds = 300.0
    """Seconds without progress after which a trajectory starts again as its next attempt."""
    max_attempts: Positive = 3
    """Attempts of a trajectory. If its environment failed each time, the trajectory is lost; if generators failed, the
    group is refused."""
    group_deadline: Seconds | None = None
    """Seconds from a group's claim; then only its complete trajectories are trained, or none if there are fewer than
    two. None: no deadline."""
    lease_deadline: Seconds = 1800.0
    """Seconds after which the groups of a leased mini-batch are leased again."""
    max_lease_attempts: Positive = 3
    """Leases of a group; if it is still untrained after the last one, it is refused."""
    max_bytes: Annotated[int, Field(gt=0, le=LARGEST_HOST)] = 4 << 30
    """Bytes of memory for steps. A group is admitted only if the worst case of all admitted groups fits."""
    max_group_bytes: Annotated[int, Field(gt=0, le=1 << 40)] = 256 << 20
    """Bytes of one group. Each trajectory may have an equal part; a message that exceeds it is refused."""
    max_journal_bytes: Positive = 64 << 30
    """Bytes of the buffer's journal on disk."""
    merge: MergeMode = "linear"
    """Which steps share a row: none (`off`); a step and the previous step that it continues (`linear`), or any earlier
    step (`tree`)."""


class PlacementConfig(Section):
    """The labels that hosts of a part of the run must have, each as `value`, `!value`, `in(a, b)` or `!in(a, b)`."""

    trainer: Labels = {}
    """Labels of the hosts for the trainer's ranks."""
    generators: Labels = {}
    """Labels of the hosts for the generators, such as `{ray.io/market-type: spot}`."""
    buffer: Labels = {MARKET: "!spot"}
    """Labels of the host for the buffer: preferably the driver's host, else another host with the labels, else any
    host."""


class WandbConfig(Section):
    """Logging to Weights & Biases, in addition to `metrics.jsonl` and TensorBoard; needs the package wandb.

    Its environment variables apply, such as WANDB_MODE, WANDB_RUN_GROUP and WANDB_TAGS.
    """

    project: str = "baton"
    """Project of Weights & Biases."""


class MetricsConfig(Section):
    """The run's metrics service, and the trackers to which metrics are sent."""

    host: str = "127.0.0.1"
    """Address at which /metrics and /status are served."""
    port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Port of /metrics and /status; None: 9400, or the next free port; 0: any free port."""
    long_batch_tokens: Positive | None = None
    """Padded length above which a mini-batch is long for the alert; None: 75 % of the longest possible row."""
    wandb: WandbConfig | None = None


class Config(Section):
    """All settings of a run."""

    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    env: EnvConfig = EnvConfig()
    agents: AgentsConfig | None = None
    """The endpoint for agents; None: an endpoint with default settings if `env.name` is `agent`, otherwise no
    endpoint."""
    roles: Annotated[dict[Name, RoleConfig], Field(max_length=MAX_NAMED)] = {}
    """Roles other than `main`, by name; each role has its own rewards and its own baseline."""
    generator: GeneratorConfig = GeneratorConfig()
    scorers: dict[Name, ScorerConfig] = {}
    """Reward models, judges and teachers, by name."""
    buffer: BufferConfig = BufferConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    trainer: TrainerConfig = TrainerConfig()
    weights: WeightsConfig = WeightsConfig()
    placement: PlacementConfig = PlacementConfig()
    metrics: MetricsConfig = MetricsConfig()

    @property
    def without_adapter(self) -> Config:
        """A copy of the configuration, in which all weights are trained instead of an adapter."""
        return self.model_copy(update={"model": self.model.model_copy(update={"lora": None, "adapter": None})})

    @property
    def endpoint(self) -> AgentsConfig | None:
        """The settings of the endpoint for agents; None without an endpoint."""
        return AgentsConfig() if self.agents is None and self.env.name == AGENT else self.agents

    @property
    def trained_roles(self) -> tuple[str, ...]:
        """Names of the roles whose steps carry loss."""
        kinds: tuple[str, ...] = self.endpoint.train if self.endpoint is not None else TRAINED
        return (*kinds, *(name for name, role in self.roles.items() if role.mode == "trained"))

    @property
    def most_steps(self) -> int:
        """Maximum number of steps of a trajectory. A step is a turn in an environment, or a call of an agent."""
        return max(self.env.max_turns, self.endpoint.max_calls if self.endpoint is not None else 0)

    @property
    def notes(self) -> list[str]:
        """One line for each setting whose value is allowed, but has an effect that the user may not expect."""
        notes = []
        if self.model.path is not None and (most := self.generator.max_generate_length - 1) < SHORT_ANSWER:
            notes.append(
                f"generator.max_generate_length: every answer is cut after {most} tokens, since one is kept for its end"
            )
        if self.run.store is not None and not self.trainer.checkpoint_every:
            notes.append(
                "run.store: only the end of the run is uploaded (final weights, metrics, summary), since "
                "trainer.checkpoint_every is 0; set it, so that the run can go on from the store"
            )
        return notes
