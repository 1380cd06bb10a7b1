"""Settings of the rollout: prompts, environments, agents, roles, engines, scorers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, JsonValue, model_validator

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
from service.handoff.steps.values import MAX_REWARD

COLDEST, HOTTEST = 0.01, 2.0
"""Lowest and highest temperature in training. vLLM refuses a higher one, and raises a lower one to COLDEST; the trainer
would then compute another distribution."""

COMPUTE_SCORE = "compute_score"
"""Name of the environment that calls `env.compute_score`."""

MADE_SET = "made"
"""Name of the evaluation set that `data.eval_make_rows` makes."""


class MixturePart(Section):
    """One of the datasets from which training prompts are mixed."""

    path: Dataset
    """A JSONL or parquet file with one prompt per row."""
    weight: Annotated[float, Field(gt=0, le=1e12)] = 1.0
    """The dataset's fraction of all prompts is this weight over the sum of all weights."""


class CurriculumConfig(Section):
    """Skips prompts by the fraction of their trajectories that succeeded; see docs/environments.md."""

    band: Range = (0.1, 0.9)
    """A prompt is issued in every epoch if its fraction of successes lies in this band."""
    outside: Fraction = 0.1
    """Fraction of the epochs in which a prompt outside of the band is issued; 0: only if all prompts are outside."""
    success_above: float = 0.0
    """A trajectory succeeds if its return is above this number."""


class ColumnsConfig(Section):
    """Names of the columns that are read from a published dataset.

    Not needed if each row has `prompt`, and `reward_spec` or `reward_model`.
    """

    prompt: str = "prompt"
    """Column with the question, as a text or as messages."""
    ground_truth: str | None = None
    """Column with the right answer; None: it is in `reward_spec` or `reward_model`."""
    answer: Literal["text", "hashes", "boxed"] = "text"
    """Part of `ground_truth` that is the answer: all (`text`), what follows the last `####` (`hashes`, GSM8K), or the
    content of the last `\\boxed{}` (`boxed`, MATH)."""
    instruction: str = ""
    """Text that is added in a new line to each prompt that is a text."""


class DataConfig(Section):
    """Training prompts and evaluation sets."""

    train: Dataset | None = None
    """One prompt per row: a JSONL or parquet file, a folder of such files, a pattern as in `shards/train-*.parquet`,
    `hf:org/name@revision:file`, or a folder of Harbor's tasks."""
    make_rows: Positive | None = None
    """Synthetic rows that the environment makes, in place of `train`."""
    mixture: dict[str, MixturePart] = {}
    """Datasets by name, in place of `train`, mixed by their weights; an epoch has each row at least once."""
    columns: ColumnsConfig | None = None
    """Names of the columns in the files of `train`, `mixture` and `eval`; None: the names of Baton, SkyRL or verl."""
    eval: dict[str, Dataset] = {}
    """Evaluation sets by name: JSONL or parquet files."""
    eval_make_rows: Positive | None = None
    """Synthetic rows that the environment makes for an evaluation set named `made`."""
    eval_every: NotNegative = 0
    """Optimizer steps from one evaluation to the next; 0: none during training."""
    eval_samples: Count = 1
    """Trajectories of each evaluation prompt."""
    eval_rows: Positive | None = 512
    """Rows of each set that evaluations during training play, the same in all runs; None: all. Afterwards, and in
    `baton eval`, all rows are played."""
    eval_temperature: Annotated[float, Field(ge=0, le=HOTTEST)] | None = None
    """Temperature of evaluations; 0: greedy; None: as in training."""
    eval_deadline: Seconds = 3600.0
    """Seconds after which an evaluation is cancelled; the run continues."""
    shuffle: bool = True
    """Shuffle the rows of each epoch with the run's seed."""
    curriculum: CurriculumConfig | None = None
    """Skip prompts according to their success so far."""


AGENT = "agent"
"""The value of `env.name` with which the command `env.command` plays each trajectory."""

OWN_VARIABLES = ("OPENAI_BASE_URL", "OPENAI_API_KEY", "ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY")
"""Environment variables that Baton sets to the address and the key of an agent's session."""


Limit = Annotated[int, Field(ge=1024, le=1 << 62)]
"""A limit on a resource, in the range that the operating system accepts."""


class CommandLimits(Section):
    """Limits of one run of a command. They contain mistakes; for a sandbox see SECURITY.md."""

    seconds: Seconds = 1800.0
    """Seconds of a command's run. Then its processes are killed, and the result so far is scored."""
    score_seconds: Seconds = 300.0
    """Seconds within which the trajectory must be scored."""
    memory_bytes: Limit = 16 << 30
    """Private memory that one process of the command may write (RLIMIT_DATA)."""
    file_bytes: Limit = 1 << 30
    """Bytes of one file that the command writes, also of its output (RLIMIT_FSIZE)."""


TEMPLATE = "give a folder of which each trajectory gets a copy, or null"


class CommandConfig(Section):
    """A command that is run as an agent."""

    command: tuple[str, ...] = ()
    """With `name: agent`: the program and its arguments, in which {prompt}, {prompt_file}, {folder}, {base_url} and
    {seed} are replaced. Without the first two, the prompt is the standard input."""
    workdir: Annotated[UserPath, Named("template", "folder", TEMPLATE)] | None = None
    """Folder that is copied for each run of the command, as its current folder and home. None: an empty folder."""
    score: str | tuple[str, ...] | None = None
    """What scores a trajectory: a function of a trusted module (`module:function`), or a command as a list. None: the
    agent sends its reward to the endpoint."""
    variables: dict[str, str] = {}
    """Environment variables of the command. From Baton's environment it gets only PATH."""
    limits: CommandLimits = CommandLimits()


class EnvConfig(CommandConfig):
    """The environment in which trajectories are played."""

    name: str = "lookup"
    """Registered name of the environment; `agent`: `command` plays each trajectory."""
    compute_score: str | None = None
    """A reward function with verl's signature, as `module:function`; it takes the place of `name` and `options`."""
    max_turns: Positive = 4
    """Turns after which an environment's trajectory ends."""
    step_deadline: Seconds = 60.0
    """Seconds in which one call of the environment must return."""
    options: dict[str, str | int | float | bool] = {}
    """Arguments of the environment's constructor."""
    class_options: dict[str, dict[str, str | int | float | bool]] = {}
    """Options of other environments that rows name in `env_class`, by name."""
    trusted_modules: tuple[str, ...] = ()
    """Modules whose classes may be named as `module:Class`, submodules included."""
    isolation: Literal["none", "process"] = "none"
    """`process`: every open episode has its own child process, which is killed if it blocks."""
    max_processes: Count = 256
    """Child processes of one generator at the same time; further episodes wait."""

    @model_validator(mode="before")
    @classmethod
    def _scored(cls, settings: Any) -> Any:
        if not isinstance(settings, dict) or not (function := settings.get(COMPUTE_SCORE)):
            return settings
        return settings | {"name": COMPUTE_SCORE, "options": {"function": function}}


FailureName = Annotated[str, BeforeValidator(str), Field(pattern=FAILURE, max_length=80)]
"""An exit code other than 0, or the class name of an exception."""


class AgentsConfig(Section):
    """The address at which agents of any kind call the policy; each session is a trajectory."""

    host: Annotated[str, Field(min_length=1, max_length=253, pattern=HOST)] = "127.0.0.1"
    """The driver's machine listens here for all agents. If it is not loopback, keys and texts cross the network
    unencrypted."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port of the address. 0: any free port; each part of a resumed run takes a new one."""
    deadline: Seconds = 3600.0
    """Seconds in which an agent must finish its session."""
    end_grace: Annotated[float, Field(ge=0, le=1e9)] = 0.0
    """Seconds that open sessions have to end after the last optimizer step; then they are cut."""
    max_calls: Annotated[int, Field(gt=0, le=4096)] = 64
    """Calls of a session. A further call makes no step, and its answer says so."""
    max_tokens: Positive = 1 << 15
    """Tokens in all steps of a session; tokens that several calls share count once."""
    train: tuple[Literal["main", "sub", "aux"], ...] = ("main", "sub")
    """Roles of calls that are trained: main, sub (another system prompt), aux (single questions, as for a title)."""
    structured: Literal["ignore", "refuse"] = "ignore"
    """A request that prescribes the form of the answer (a JSON schema, a forced tool) is answered freely (`ignore`) or
    refused."""
    exit_code_reward: dict[FailureName, Annotated[float, Field(ge=-MAX_REWARD, le=MAX_REWARD)]] = {}
    """Rewards for failures that the policy caused: by the command's exit code, as in `{1: 0.0}`, or by the exception
    that `play` raised. After other failures, the trajectory is attempted again."""
    tool_parser: str = "json"
    """Parser of tool calls and thinking: `json`, for Qwen and Hermes models; or names of vLLM's parsers, such as
    `hermes`, or `hermes+deepseek_r1` with one for the thinking."""


class RoleConfig(Section):
    """A role, other than `main`, that an environment or an agent can give to turns; see docs/roles.md."""

    mode: Literal["trained", "frozen", "judge"] = "trained"
    """The policy plays the role and is trained on it (`trained`) or not (`judge`), or another model plays it
    (`frozen`)."""
    url: Annotated[str, Field(pattern=URL)] | None = None
    """For a frozen role: an OpenAI-compatible endpoint, including `/v1`."""
    model: str | None = None
    """For a frozen role: name of the model at `url`."""
    key_file: KeyFile | None = None
    """For a frozen role: file with the key that is sent to `url`."""


class EnginesRange(Section):
    """The smallest and the largest number of generators of a run."""

    min: Count = 1
    """Generators for which the cluster must have room before the run starts."""
    max: Count = 1
    """More generators join when the cluster has room, up to this number."""


class GeneratorConfig(Section):
    """The generators: each has a vLLM engine, and plays trajectories with it."""

    engines: Count | EnginesRange = 1
    """Number of generators, each with one engine; `{min: 1, max: 8}`: they may join and leave during the run."""
    leave_grace: Seconds = 20.0
    """Seconds for which a generator whose node is drained still plays its trajectories, before it hands them over."""
    tensor_parallel_size: Count = 1
    """GPUs that share each layer of an engine."""
    concurrent_groups: Count = 32
    """Groups that all engines together generate at the same time."""
    max_input_length: Positive = 1024
    """Tokens of a turn's prompt."""
    max_generate_length: Annotated[int, Field(ge=2, le=MOST)] = 256
    """Tokens of a turn's response; one is reserved for an end token that may be appended."""
    temperature: Annotated[float, Field(ge=COLDEST, le=HOTTEST)] = 1.0
    """Sampling temperature in training."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample only among the most probable tokens that together have this probability; the trainer does the same."""
    top_k: NotNegative = 0
    """Sample only among this many most probable tokens, 2 to 512; 0: all. `top_p` and `min_p` too may leave at most
    512; with `top_k`, engine and buffer need less room."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Sample only among tokens with at least this fraction of the most probable token's probability."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Stop strings. After a stop string, an end token is appended; it carries no loss."""
    conversation: Literal["append", "rerender", "inline"] = "append"
    """Prompt of the next turn. `append`: new messages follow the unchanged tokens; `rerender`: the whole conversation
    is rendered again; `inline`: the new text follows as plain text in one message of the assistant."""
    chat_template_options: dict[str, str | int | float | bool] = {}
    """Options of the chat template, such as `enable_thinking: false`."""
    kv_cache_bytes: Positive | None = None
    """Bytes of one engine's KV cache; None: limited by `gpu_memory_utilization`."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.85
    """Fraction of a GPU's memory that its engine may use."""
    enforce_eager: bool = False
    """Run engines without compilation and CUDA graphs."""
    record_experts: bool = True
    """Engines on GPUs record the experts of each token for the trainer; false: the trainer's router chooses, and
    log-probabilities differ more."""
    quantization: Literal["fp8"] | None = None
    """`fp8`: an engine on a GPU computes with 8-bit weights, so its distribution differs from the trainer's; needs
    `algorithm.correction`."""
    engine_options: dict[str, JsonValue] = {}
    """Further arguments of vLLM's `AsyncEngineArgs`, such as `max_num_batched_tokens`; see docs/engine-options.md."""
    request_deadline: Seconds = 300.0
    """Seconds in which an engine must generate one turn."""
    silent_deadline: Seconds = 60.0
    """Seconds without an answer after which a generator is restarted."""

    @property
    def engine_gpus(self) -> int:
        """Number of GPUs of one engine: the tensor parallel size times the number of pipeline stages."""
        stages = self.engine_options.get("pipeline_parallel_size", 1)
        return self.tensor_parallel_size * (stages if isinstance(stages, int) else 1)

    @property
    def longest_row(self) -> int:
        """Maximum tokens of a row that consists of one step, prompt and response together."""
        return self.max_input_length + self.max_generate_length

    @property
    def min_engines(self) -> int:
        """Number of engines with which the run starts."""
        return self.engines if isinstance(self.engines, int) else self.engines.min

    @property
    def max_engines(self) -> int:
        """Maximum number of engines at the same time."""
        return self.engines if isinstance(self.engines, int) else self.engines.max


class ScorerConfig(Section):
    """A scorer of complete groups: `use`, or for a teacher one of `use`, `url` and `model`. See docs/scorers.md.

    When all trajectories of a group have ended, the scorer rewards each of them; then the group can be trained.
    """

    kind: Literal["rewards", "teacher"] = "rewards"
    """One reward per trajectory, or the log-probability of each sampled token under another model."""
    use: str | None = None
    """A function, or a class with a method `score` (a teacher: `logprobs`), as `your.module:name`."""
    url: Annotated[str, Field(pattern=URL)] | None = None
    """For a teacher: a completions endpoint of vLLM that serves only the teacher's model."""
    model: ModelFolder | None = None
    """For a teacher: the Hugging Face folder of its model, which an engine of this run serves."""
    tokenizer: Annotated[UserPath, Named("tokenizer", "folder", "give a Hugging Face folder")] | None = None
    """For a teacher at `url`: the folder of its tokenizer, which must be the policy's."""
    key_file: KeyFile | None = None
    """File with the key that is sent to `url` as `Authorization: Bearer`."""
    options: dict[str, str | int | float | bool] = {}
    """Arguments of the class's constructor."""
    combine: Literal["replace", "add"] = "replace"
    """The scorer's reward replaces the environment's reward, or is added to it."""
    weight: float = 1.0
    """Factor by which the scorer's reward is multiplied."""
    workers: Count = 1
    """Groups that are scored at the same time. With `use`, each worker is a process."""
    deadline: Seconds = 60.0
    """Seconds in which a group must be scored."""
    attempts: Positive = 3
    """Attempts to score a group; then `fallback` applies."""
    fallback: Literal["refuse", "environment_reward"] = "refuse"
    """A group that could not be scored is refused, or continues without this scorer."""
    cpus: Annotated[float, Field(ge=0)] = 0.0
    """CPUs that Ray reserves for each process."""
    gpus: Annotated[float, Field(ge=0)] = 0.0
    """GPUs that Ray reserves for each process."""

    @property
    def n_processes(self) -> int:
        """Number of the scorer's processes."""
        return self.workers if self.use is not None else 1
