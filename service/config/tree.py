"""The configuration tree: strict and frozen, every field with its meaning and unit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from service.config.command import AGENT
from service.config.engine_options import warnings
from service.config.learn import AlgorithmConfig, TrainerConfig, WeightsConfig
from service.config.lora import LoraConfig
from service.config.model_folder import tools_note
from service.config.rollout import (
    AgentsConfig,
    DataConfig,
    EnvConfig,
    GeneratorConfig,
    RoleConfig,
    ScorerConfig,
)
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
from service.handoff.steps.roles import MAX_NAMED, TRAINED

_VALUE = r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
_NAME = re.compile(rf"([a-z0-9]([a-z0-9.-]{{0,251}}[a-z0-9])?/)?{_VALUE}")
_CHOICE = re.compile(rf"!?({_VALUE}|in\({_VALUE}(, ?{_VALUE})*\))")

SHORT_ANSWER = 16
"""A length limit below this many tokens cuts off most answers of a pretrained model."""

MARKET = "ray.io/market-type"
"""Ray's label for the kind of host; a host with the value `spot` may be taken away at short notice."""


def _label(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError(f"must be the name of a label, such as {MARKET}")
    return name


def _choice(text: str) -> str:
    if not _CHOICE.fullmatch(text):
        raise ValueError("must be a value, !value, in(one, other) or !in(one, other)")
    return text.replace(" ", "")  # to Ray a space is part of the value that follows


Labels = dict[Annotated[str, AfterValidator(_label)], Annotated[str, AfterValidator(_choice)]]
"""Ray's label selector: the required value of each label of a host."""


class RunConfig(Section):
    """The run as a whole."""

    name: Annotated[str, Field(pattern=FOLDER_NAME, max_length=200)] = "run"
    """Name of the run and of its folder."""
    dir: UserPath = Path("runs")
    """Folder of the run folders; it must outlast the process (a Ray job's working directory does not)."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of all random numbers of the run."""
    max_steps: Annotated[int, Field(gt=0, lt=1 << 31)] = 100
    """Optimizer steps after which the run ends; each token carries the step of its policy in 31 bits."""
    max_restarts: NotNegative = 3
    """Failures of a generator, or of the trainer, that a run survives without an optimizer step in between. Steps that
    a trainer repeats after a failure do not count."""
    trajectories_per_step: NotNegative = 2
    """Number of trajectories of each mini-batch that are kept in `trajectories.jsonl` until the file is full. The
    same number is kept of the trajectories that ended untrained since the previous mini-batch."""
    keep_best: Annotated[str, Field(pattern=SCORE)] | None = None
    """Score of an evaluation set, such as `eval/made/avg_score`: the weights with the highest score are kept in
    `best/` of the run folder; None: no weights are kept there."""
    insecure_local: bool = False
    """Allow a Ray cluster without authentication; only for a machine that nobody else can reach."""
    stop_grace: Seconds = 600.0
    """Seconds from a stop signal until the run is ended by force; before that it finishes its optimizer step and writes
    the final weights."""
    stall_deadline: Seconds = 600.0
    """Seconds without a mini-batch after which the run fails."""
    store: str | None = None
    """Address of an object store, such as `s3://bucket/run`, to which checkpoints and the final weights are uploaded;
    needs the package obstore. Credentials come from the environment."""
    store_deadline: Seconds = 600.0
    """Seconds without progress of the uploads after which a run that ends stops waiting for them."""


class MakeModelConfig(Section):
    """The shape of a small random Qwen3 model that the run makes, with a tokenizer for the environment's words."""

    hidden_size: Annotated[int, Field(gt=0, le=4096)] = 128
    intermediate_size: Annotated[int, Field(gt=0, le=16384)] = 256
    num_layers: Annotated[int, Field(gt=0, le=64)] = 2
    num_heads: Annotated[int, Field(gt=0, le=64)] = 4
    num_kv_heads: Annotated[int, Field(gt=0, le=64)] = 2
    head_dim: Annotated[int, Field(gt=0, le=256, multiple_of=2)] = 32


class WarmStartConfig(Section):
    """Supervised training on the environment's demonstrations before RL begins."""

    steps: Positive = 300
    batch_size: Positive = 64
    lr: Annotated[float, Field(gt=0)] = 2e-3
    right_fraction: Fraction = 0.15
    """Fraction of the demonstrations that solve the task; the others show mistakes."""
    demonstrations: Positive = 4096
    """Number of demonstrations that are made; batches are drawn from them."""


class ModelConfig(Section):
    """The policy."""

    path: Annotated[UserPath, Named("model folder", "folder", "give a Hugging Face folder")] | None = None
    """A Hugging Face folder (config, safetensors, tokenizer, chat template), or `hf:org/name@revision`."""
    make: MakeModelConfig | None = None
    """Make a small model instead of reading `path`."""
    warm_start: WarmStartConfig | None = None
    """Supervised training before RL. It trains all weights, also if `lora` is set: the adapter is added to the
    warm-started model."""
    lora: LoraConfig | None = None
    """Train a low-rank adapter and leave the model's weights unchanged; None: train all weights."""
    adapter: Annotated[UserPath, Named("adapter", "folder", "give a folder with adapter_config.json")] | None = None
    """Folder of an adapter in PEFT's form from which training starts; its rank, alpha and targets must be those of
    `lora`."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Data type of the parameters in forward passes of engine and trainer."""


class BufferConfig(Section):
    """The buffer: admission, staleness, deadlines, and bounds on memory and disk."""

    lookahead: Versions = 2
    """Number of mini-batches that generators may begin ahead of the next mini-batch to be trained, as seen from the
    policy version that they serve; 0: strictly on-policy."""
    max_staleness: Versions = 8
    """Staleness in versions above which a token carries no loss."""
    order: Literal["finished_first", "strict"] = "finished_first"
    """Which groups a mini-batch takes: those that became complete first, or strictly those that were issued first."""
    step_deadline: Seconds = 300.0
    """Seconds without progress after which a trajectory is restarted as its next attempt."""
    max_attempts: Positive = 3
    """Maximum attempts of a trajectory. If its environment failed each time, the trajectory is lost; if its generators
    crashed or timed out, its group is refused."""
    on_group_deadline: Literal["train_partial", "expire"] | None = None
    """At a group's deadline: train its complete trajectories, or none of them; None: groups have no deadline."""
    group_deadline: Seconds = 3600.0
    """Seconds from a group's claim to its deadline."""
    lease_deadline: Seconds = 1800.0
    """Seconds after which the lease of a mini-batch ends, and the mini-batch is leased again."""
    max_lease_attempts: Positive = 3
    """Number of leases after which an untrained group is refused."""
    max_bytes: Annotated[int, Field(gt=0, le=LARGEST_HOST)] = 4 << 30
    """Maximum bytes of memory: groups are admitted only while the worst case of all admitted groups fits."""
    max_group_bytes: Annotated[int, Field(gt=0, le=1 << 40)] = 256 << 20
    """Maximum bytes of one group, divided equally among its trajectories; a message is refused if a trajectory exceeds
    its part."""
    max_journal_bytes: Positive = 64 << 30
    """Maximum bytes of the journal on disk."""
    record: bool = False
    """Keep old parts of the journal, so that `baton replay` can form every mini-batch again."""
    sync_interval: Seconds = 0.005
    """Minimum seconds between two syncs of the journal."""
    merge: MergeMode = "linear"
    """Which steps share a row. off: none; linear: steps that continue the previous step; tree: steps that continue any
    earlier row."""


class PlacementConfig(Section):
    """Labels of the hosts where a part of the run may be: a value, `!value`, `in(one, other)`, `!in(one, other)`."""

    trainer: Labels = {}
    """Labels of the hosts of the trainer's ranks."""
    generators: Labels = {}
    """Labels of the hosts of the generators, such as `{ray.io/market-type: spot}` for hosts that may be taken
    away at short notice."""
    buffer: Labels = {MARKET: "!spot"}
    """Labels that the buffer's host should have: the driver's host if it has them, else another host that has them,
    else any host."""


class WandbConfig(Section):
    """Weights & Biases, in addition to `metrics.jsonl` and TensorBoard; needs the package wandb."""

    project: str = "baton"
    offline: bool | None = None
    """Write to the run folder only; `wandb sync` uploads the data later. None: only if there is no key, neither in
    WANDB_API_KEY nor from `wandb login`."""
    group: str | None = None
    """Runs of a group are shown together, such as the seeds of one experiment."""
    tags: list[str] = []
    table_every: NotNegative = 10
    """Optimizer steps between two tables of sample trajectories with their texts; 0: no tables."""


class MetricsConfig(Section):
    """Metrics service and trackers."""

    host: str = "127.0.0.1"
    """Address on which /metrics and /status are served."""
    port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Port of /metrics and /status; None: 9400, or the next free one; 0: any free one."""
    long_batch_tokens: Positive | None = None
    """Padded length above which the alert counts a mini-batch as long; None: 75 % of the longest possible row."""
    wandb: WandbConfig | None = None


class Config(Section):
    """All settings of a run."""

    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    env: EnvConfig = EnvConfig()
    agents: AgentsConfig | None = None
    """The endpoint for agents; None: an endpoint with default settings if `env.name` is agent, otherwise none."""
    roles: Annotated[dict[Name, RoleConfig], Field(max_length=MAX_NAMED)] = {}
    """Roles other than `main`, by name, each with rewards and a baseline of its own."""
    generator: GeneratorConfig = GeneratorConfig()
    scorers: dict[Name, ScorerConfig] = {}
    """Reward models, judges and teachers by name."""
    buffer: BufferConfig = BufferConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    trainer: TrainerConfig = TrainerConfig()
    weights: WeightsConfig = WeightsConfig()
    placement: PlacementConfig = PlacementConfig()
    metrics: MetricsConfig = MetricsConfig()

    @property
    def merge_mode(self) -> MergeMode:
        """How steps become rows: `buffer.merge`; without `step_wise`, all steps of a trajectory become one row."""
        return self.buffer.merge if self.algorithm.step_wise else "linear"

    @property
    def without_adapter(self) -> Config:
        """The same configuration, with all weights trained."""
        return self.model_copy(update={"model": self.model.model_copy(update={"lora": None, "adapter": None})})

    @property
    def endpoint(self) -> AgentsConfig | None:
        """The settings of the endpoint for agents; None without an endpoint."""
        return AgentsConfig() if self.agents is None and self.env.name == AGENT else self.agents

    @property
    def trained_roles(self) -> tuple[str, ...]:
        """Roles whose steps carry loss."""
        kinds: tuple[str, ...] = self.endpoint.train if self.endpoint is not None else TRAINED
        return (*kinds, *(name for name, role in self.roles.items() if role.mode == "trained"))

    @property
    def served_roles(self) -> dict[str, RoleConfig]:
        """Frozen roles whose models are served by engines of this run."""
        return {name: role for name, role in self.roles.items() if role.is_served}

    @property
    def most_steps(self) -> int:
        """Maximum number of steps of a trajectory: turns in an environment, calls of an agent."""
        return max(self.env.max_turns, self.endpoint.max_calls if self.endpoint is not None else 0)

    @property
    def notes(self) -> list[str]:
        """A line for each allowed setting with an effect that the user may not expect."""
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
        if self.endpoint is not None and self.model.path is not None and (note := tools_note(self.model.path)):
            notes.append(note)
        return [*notes, *warnings(self.generator.engine_options)]
