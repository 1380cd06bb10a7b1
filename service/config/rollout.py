"""Settings of the rollout: prompts, environments, engines, scorers."""

from __future__ import annotations

import os
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, JsonValue

from service.config.command import CommandConfig
from service.config.section import (
    FAILURE,
    HOST,
    MOST,
    URL,
    Count,
    Dataset,
    Fraction,
    KeyFile,
    ModelFolder,
    Named,
    NotNegative,
    Positive,
    Range,
    Seconds,
    Section,
    UserPath,
)
from service.handoff.steps.reward import MAX_REWARD

COLDEST, HOTTEST = 0.01, 100.0
"""Bounds of the temperature in training; vLLM raises a lower temperature to COLDEST, so the trainer could not recompute
the sampling distribution."""

MADE_SET = "made"
"""Name of the evaluation set that `data.eval_make_rows` makes."""


class MixturePart(Section):
    """One dataset of a mixture."""

    path: Dataset
    """A JSONL or parquet file with one prompt a row."""
    weight: Annotated[float, Field(gt=0, le=1e12)] = 1.0
    """The dataset's weight: its fraction of all prompts is the weight divided by the sum of all weights."""


class CurriculumConfig(Section):
    """Skips prompts according to their success so far; see docs/environments.md."""

    band: Range = (0.1, 0.9)
    """Lowest and highest success with which a prompt is issued in every epoch."""
    outside: Fraction = 0.1
    """Fraction of the epochs in which a prompt outside of the band is issued; 0: never again."""
    min_groups: Positive = 1
    """Number of groups after which a prompt's success decides; a prompt with fewer groups is always issued."""
    success_above: float = 0.0
    """A trajectory succeeds if its return is larger."""


class ColumnsConfig(Section):
    """Names of the columns to read from a published data set. Not needed where each row has `prompt` and one of
    `reward_spec` and `reward_model`."""

    prompt: str = "prompt"
    """Column of the question: a text, or messages."""
    ground_truth: str | None = None
    """Column of the right answer; None: `reward_spec` or `reward_model` has it."""
    answer: Literal["text", "hashes", "boxed"] = "text"
    """Part of the `ground_truth` column that is the answer. `text`: all of it; `hashes`: the text after the last
    `####`, as in GSM8K; `boxed`: the content of the last `\\boxed{}`, as in MATH."""
    instruction: str = ""
    """Text that is added, on a line of its own, to each prompt that is a text, such as the form of the answer."""


class DataConfig(Section):
    """Training prompts and evaluation sets."""

    train: Dataset | None = None
    """A JSONL or parquet file with one prompt a row, or `hf:org/name@revision:file`."""
    make_rows: Positive | None = None
    """Number of synthetic rows that the environment's generator makes, instead of rows read from `train`."""
    mixture: dict[str, MixturePart] = {}
    """Several datasets by name instead of `train`, mixed in proportion to their weights; an epoch has each row at least
    once."""
    columns: ColumnsConfig | None = None
    """Names of the columns of `train`, `mixture` and `eval`; None: the files have the columns that Baton, SkyRL or verl
    write."""
    eval: dict[str, Dataset] = {}
    """Evaluation sets by name: JSONL or parquet files."""
    eval_make_rows: Positive | None = None
    """Number of synthetic rows that the environment's generator makes as an evaluation set `made`."""
    eval_every: NotNegative = 0
    """Optimizer steps between evaluations; 0: no evaluations during training."""
    eval_mode: Literal["pause", "beside"] = "pause"
    """What training does during an evaluation: it waits (`pause`), or continues while `eval_engines` engines keep
    the evaluated weights (`beside`). After the last step, and if too few engines are up, it waits in any case."""
    eval_engines: Count = 1
    """Engines that evaluate with `eval_mode: beside`; they claim nothing until the evaluation is done."""
    eval_samples: Count = 1
    """Trajectories of each evaluation prompt."""
    eval_rows: Positive | None = 512
    """Rows of each set that are played in evaluations during training, the same rows in all runs; None: all rows. After
    the last step of the run, and by `baton eval`, every row is played."""
    eval_temperature: Annotated[float, Field(ge=0)] | None = None
    """Sampling temperature of evaluations, 0 for greedy decoding; None: as in training."""
    eval_deadline: Seconds = 3600.0
    """Seconds after which an evaluation is cancelled; the run continues without its results."""
    shuffle: bool = True
    """Shuffle each epoch with the run's seed."""
    curriculum: CurriculumConfig | None = None
    """Issue prompts according to their success so far; None: each prompt once an epoch."""


class EnvConfig(CommandConfig):
    """The environment."""

    name: str = "lookup"
    """Name of the environment, as registered; agent: each trajectory is a run of `command`."""
    workers: Literal["here", "outside"] = "here"
    """With `name: agent`, who runs `command`. `here`: the generators; `outside`: workers on other machines, which claim
    trajectories from the endpoints (`baton agent-worker`)."""
    max_turns: Positive = 4
    step_deadline: Seconds = 60.0
    """Seconds within which one call of the environment must return."""
    options: dict[str, str | int | float | bool] = {}
    """Arguments of the environment's constructor."""
    class_options: dict[str, dict[str, str | int | float | bool]] = {}
    """Options of other environments that rows name in `env_class`, by that name."""
    trusted_modules: tuple[str, ...] = ()
    """Modules, including their submodules, from which `name` and `env_class` may name classes as `module:Class`."""
    isolation: Literal["none", "process"] = "none"
    """`process`: every open episode has a process of its own, which is killed if it blocks."""
    max_processes: Count = 256
    """Maximum number of processes of one generator at once; further episodes wait for a process to end."""
    max_observation_characters: Positive = 1 << 20
    """Maximum number of characters of one observation, over all texts and names of its messages; a longer observation
    fails the trajectory."""
    max_snapshot_bytes: Annotated[int, Field(ge=0, le=1 << 18)] = 4096
    """Maximum bytes of the data with which another generator can continue after a step: the environment's snapshot in
    base64 and the messages after the step. A trajectory that needs more restarts if its generator is lost."""


FailureName = Annotated[str, BeforeValidator(str), Field(pattern=FAILURE, max_length=80)]
"""An exit code other than 0, or the name of an exception's class."""


class AgentsConfig(Section):
    """The endpoint in each generator, at which agents of any kind call the policy; a session is a trajectory."""

    host: Annotated[str, Field(min_length=1, max_length=253, pattern=HOST)] = "127.0.0.1"
    """Address of the endpoint. With another address than loopback, keys and texts cross the network unencrypted."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port of the first generator's endpoint; each further generator has the next port. 0: each generator takes a free
    port, a different one after a restart."""
    deadline: Seconds = 3600.0
    """Seconds within which an agent must finish its session."""
    worker_key_file: Annotated[UserPath, Named("worker key")] | None = None
    """File with the key of workers, which claim sessions from other machines; None: the key in the environment
    variable BATON_WORKER_KEY; if that is not set either, no worker may claim."""
    heartbeat_deadline: Seconds = 60.0
    """Seconds without a call or a heartbeat, after which a worker's session is lost. After a restart of its generator
    a session may take the same time until its next call or heartbeat."""
    max_calls: Annotated[int, Field(gt=0, le=4096)] = 64
    """Maximum number of calls of a session; a further call is answered with a text that says so, and makes no step."""
    max_tokens: Positive = 1 << 15
    """Maximum number of tokens of all steps of a session; tokens that several calls share count once."""
    train: tuple[Literal["main", "sub", "aux"], ...] = ("main", "sub")
    """Roles of conversations that are trained: main, sub (with a system prompt of its own), aux (a single question
    outside the conversations, such as a request for a title)."""
    structured: Literal["ignore", "constrain", "refuse"] = "ignore"
    """How a request that prescribes the answer's form (a JSON schema, a forced tool) is handled. `ignore`: the policy
    answers freely; `constrain`: the engine enforces the form, and the answer carries no loss; `refuse`: the request is
    refused. A forced call has the form that `tool_parser: json` reads."""
    exit_code_reward: dict[FailureName, Annotated[float, Field(ge=-MAX_REWARD, le=MAX_REWARD)]] = {}
    """Rewards of agents that failed because of what the policy wrote: by the exit code of the command, as in
    `{1: 0.0}`, or by the name of the exception that `play` raised. Other failures are attempted again."""
    tool_parser: str = "json"
    """Parser of tool calls and thinking in responses: json, as Qwen's and Hermes' models write them; or vLLM's parsers
    by name, such as `hermes` or, with one for the thinking, `hermes+deepseek_r1`."""


class RoleConfig(Section):
    """A role other than `main` that an environment or an agent gives to its turns; see docs/roles.md."""

    mode: Literal["trained", "frozen", "judge"] = "trained"
    """`trained`: the policy plays the role and is trained on it; `judge`: the policy plays the role, untrained;
    `frozen`: another model plays the role."""
    url: Annotated[str, Field(pattern=URL)] | None = None
    """For a frozen role: address of an OpenAI-compatible endpoint, including `/v1`; None: an engine of this run
    serves the model."""
    model: Annotated[str, AfterValidator(os.path.expanduser)] | None = None
    """For a frozen role: the model's name at `url`; without `url`, its Hugging Face folder."""
    key_file: KeyFile | None = None
    """For a frozen role: file with the key for `url`; None: no key is sent."""
    gpus: Annotated[float, Field(ge=0)] = 0.0
    """GPUs that Ray reserves for the engine of a frozen role without `url`."""
    start_deadline: Seconds = 600.0
    """Seconds within which the engine of a frozen role must start."""

    @property
    def is_served(self) -> bool:
        """Whether a frozen role is played by an engine of the run."""
        return self.mode == "frozen" and self.url is None


class EnginesRange(Section):
    """How many generators a run has."""

    min: Count = 1
    """The run starts once the cluster has room for this many generators."""
    max: Count = 1
    """More generators join, up to this many, when the cluster has room; `baton scale` changes the number."""


class GeneratorConfig(Section):
    """vLLM engines and their agent loops."""

    engines: Count | EnginesRange = 1
    """Generator actors, one engine each: a number, or `{min: 1, max: 8}` for generators that join and leave."""
    leave_grace: Seconds = 20.0
    """Seconds for which a generator that leaves (`baton scale`, a drained node) continues its trajectories; then it
    hands over those that are still open, and ends."""
    tensor_parallel_size: Count = 1
    """GPUs that share each layer of an engine."""
    concurrent_groups: Count = 32
    """Number of groups that all engines together generate at once."""
    max_input_length: Positive = 1024
    """Maximum number of tokens of a turn's prompt."""
    max_generate_length: Annotated[int, Field(ge=2, le=MOST)] = 256
    """Maximum number of tokens of a turn's response, one of them reserved for an end token that the loop appends."""
    temperature: Annotated[float, Field(ge=COLDEST, lt=HOTTEST)] = 1.0
    """Sampling temperature in training."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Stop strings; if one ended the turn, an end-of-sequence token is appended with mask 0."""
    conversation: Literal["append", "rerender", "inline"] = "append"
    """The prompt of the next turn: new messages after unchanged tokens, the whole conversation rendered again (rows
    fork where the template changes earlier turns), or plain text inside one message of the assistant."""
    chat_template_options: dict[str, str | int | float | bool] = {}
    """Options of the chat template, such as `enable_thinking: false`."""
    kv_cache_bytes: Positive | None = None
    """Bytes of KV cache of one engine; None: a GPU engine uses `gpu_memory_utilization`."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.85
    """Fraction of a GPU's memory for its engine."""
    enforce_eager: bool = False
    """Skip compilation and CUDA graphs."""
    record_experts: bool = True
    """GPU engines record the experts that computed each token, which the trainer then uses too; false: the trainer's
    router chooses anew, and sampled and trained log-probabilities differ by more."""
    quantization: Literal["fp8"] | None = None
    """`fp8`: a GPU engine computes with 8-bit weights, quantised again at every update. It samples from another
    distribution than the trainer computes, so `algorithm.correction` must be on."""
    engine_options: dict[str, JsonValue] = {}
    """Further arguments of vLLM's engines by the names of `AsyncEngineArgs`, such as `max_num_batched_tokens` or
    `pipeline_parallel_size`; docs/engine-options.md lists which arguments are passed on."""
    start_deadline: Seconds = 600.0
    """Seconds within which an engine must start."""
    request_deadline: Seconds = 300.0
    """Seconds within which the engine must generate one turn."""
    silent_deadline: Seconds = 60.0
    """Seconds without an answer after which a generator counts as frozen and is restarted."""

    @property
    def engine_gpus(self) -> int:
        """GPUs of one engine: the tensor parallel size times the number of pipeline stages."""
        stages = self.engine_options.get("pipeline_parallel_size", 1)
        return self.tensor_parallel_size * (stages if isinstance(stages, int) else 1)

    @property
    def longest_row(self) -> int:
        """Maximum tokens of a row that consists of one step: prompt and response."""
        return self.max_input_length + self.max_generate_length

    @property
    def min_engines(self) -> int:
        """Number of engines with which the run starts."""
        return self.engines if isinstance(self.engines, int) else self.engines.min

    @property
    def max_engines(self) -> int:
        """Maximum number of engines at once."""
        return self.engines if isinstance(self.engines, int) else self.engines.max


class ScorerConfig(Section):
    """A scorer, which rewards the trajectories of a group once all of them have ended, before the group is trained. Set
    one of `use`, `url` and `model`. See docs/scorers.md."""

    kind: Literal["rewards", "teacher"] = "rewards"
    """`rewards`: one reward a trajectory; `teacher`: the log-probability of each sampled token under another model."""
    use: str | None = None
    """A function, or a class with a method `score` (`logprobs` for a teacher), as `your.module:name`."""
    url: Annotated[str, Field(pattern=URL)] | None = None
    """Address to which each group is sent as JSON in a POST; for a teacher, a completions endpoint of vLLM."""
    model: ModelFolder | None = None
    """A teacher's Hugging Face folder, which an engine of this run serves."""
    tokenizer: Annotated[UserPath, Named("tokenizer", "folder", "give a Hugging Face folder")] | None = None
    """For a teacher at `url`: the Hugging Face folder of its tokenizer, which must be the policy's tokenizer."""
    served_model: str = ""
    """For a teacher at `url`: the name under which the model is served there."""
    key_file: KeyFile | None = None
    """File with the key that is sent to `url` as `Authorization: Bearer`."""
    options: dict[str, str | int | float | bool] = {}
    """Arguments for the constructor of the class in `use`."""
    combine: Literal["replace", "add"] = "replace"
    """Whether the reward replaces the environment's reward or is added to it."""
    weight: float = 1.0
    """Factor of the reward."""
    workers: Count = 1
    """Groups that are scored at once. With `use`, each worker is a process, so that a hang or crash costs one group."""
    deadline: Seconds = 60.0
    """Seconds within which a group must be scored."""
    attempts: Positive = 3
    """Maximum number of times that the scorer is asked about a group before `fallback` applies."""
    fallback: Literal["refuse", "environment_reward"] = "refuse"
    """What happens to a group without a valid answer: it is refused, or continues as if there were no such scorer."""
    cpus: Annotated[float, Field(ge=0)] = 0.0
    """CPUs that Ray reserves for each process of the scorer."""
    gpus: Annotated[float, Field(ge=0)] = 0.0
    """GPUs that Ray reserves for each process of the scorer."""
    start_deadline: Seconds = 600.0
    """Seconds within which the scorer must start."""
