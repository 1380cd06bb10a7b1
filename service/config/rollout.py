"""Settings of what is played: prompts, environments, engines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from service.config.section import NotNegative, Positive, Seconds, Section, Share

COLDEST, HOTTEST = 0.01, 100.0
"""Temperatures of training; vLLM raises one that is lower, up to this, and would sample from another distribution."""

MADE_SET = "made"
"""Name of the evaluation set that `data.eval_make_rows` makes."""


class MixturePart(Section):
    """One dataset of a mixture."""

    path: Path
    """A JSONL or parquet file with a row a prompt."""
    weight: Annotated[float, Field(gt=0, le=1e12)] = 1.0
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
    max_generate_length: Annotated[int, Field(ge=2)] = 256
    """Tokens of a turn's response, at most; the last one is kept for an end that the loop appends."""
    temperature: Annotated[float, Field(ge=COLDEST, lt=HOTTEST)] = 1.0
    """Of sampling while training; engines sample at no lower one, and the trainer would not know."""
    top_p: Share = 1.0
    top_k: int = -1
    min_p: Share = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
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
