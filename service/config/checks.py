"""Refuses combinations of settings that would deadlock, lose data or be wrong, and names the consequence."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator
from urllib.parse import urlsplit

from service.config.checks_algorithm import RULES as ALGORITHM_RULES
from service.config.checks_algorithm import TEMPORAL_ESTIMATORS
from service.config.checks_command import check_command
from service.config.checks_trainer import RULES as TRAINER_RULES
from service.config.core_settings import worst_bytes
from service.config.lora import ALL, LINEAR, SLOT_RANKS
from service.config.problem import Problem
from service.config.rollout import MADE_SET
from service.config.source import Source
from service.config.store_url import store_url_problem
from service.config.tree import Config
from service.errors import ConfigError
from service.handoff.batches.score import GROUP_ESTIMATORS
from service.handoff.group_bytes import ITEM_BYTES
from service.handoff.steps.roles import ROLES, Role
from service.user_code import malformed_name

LOSSES = (
    "ppo_clip", "dual_clip", "cispo", "gspo", "rollout_is", "importance_sampling", "cross_entropy"
)  # fmt: skip


def check(config: Config, source: Source | None = None) -> None:
    """Refuse combinations of settings that cannot work.

    Raises:
        ConfigError: names every refused combination, a line each, with the place in `source` that set it.
    """
    _refuse(problems(config), source)


def check_command_only(config: Config, source: Source) -> None:
    """As `check`, of the settings of a command that is run as an agent."""
    _refuse(check_command(config), source)


def problems(config: Config) -> list[Problem]:
    """Every refused combination, in the order of the tree."""
    return [problem for rule in RULES for problem in rule(config)]


def check_bytes(config: Config, experts_per_token: int) -> None:
    """Refuse bounds of memory and journal that are too small for a model that records routed experts.

    Raises:
        ConfigError: names every bound that is too small.
    """
    _refuse(_bytes(config, experts_per_token))


def _refuse(problems: Iterable[Problem], source: Source | None = None) -> None:
    source = source or Source()
    if lines := [source.line(tuple(problem.path.split(".")), problem.message) for problem in problems]:
        raise ConfigError("\n".join(lines))


def _one_model(config: Config) -> Iterator[Problem]:
    path, make = config.model.path, config.model.make
    if path is None and make is None:
        yield Problem("model.path", "there is no model to train; give a Hugging Face folder, or model.make={}")
    if path is not None and make is not None:
        yield Problem("model.path", "model.make is set too, so it is open which model is meant; add model.make=null")
    if make is not None and make.num_heads % make.num_kv_heads:
        yield Problem(
            "model.make.num_kv_heads",
            f"must divide num_heads ({make.num_heads}); else query heads have no key head to share",
        )
    if make is not None and make.head_dim % 2:
        yield Problem("model.make.head_dim", f"{make.head_dim} is odd: rotary embeddings turn pairs of dimensions")


def _warm_start(config: Config) -> Iterator[Problem]:
    warm_start = config.model.warm_start
    if warm_start is None:
        return
    low, high = warm_start.expected_success
    if low > high:
        yield Problem(
            "model.warm_start.expected_success",
            f"[{low:g}, {high:g}] holds no success: the warm start could never end as expected; give the lower first",
        )
    if warm_start.demonstrations < warm_start.batch_size:
        yield Problem(
            "model.warm_start.demonstrations",
            f"{warm_start.demonstrations} are fewer than batch_size ({warm_start.batch_size}): not even one batch "
            "could be drawn; make more of them, or use a smaller batch",
        )


def _lora(config: Config) -> Iterator[Problem]:
    lora = config.model.lora
    if lora is None:
        if config.model.adapter is not None:
            yield Problem(
                "model.adapter", "without model.lora nothing would train it; add model.lora with its settings"
            )
        return
    if config.model.adapter is not None and config.model.warm_start is not None:
        yield Problem(
            "model.adapter",
            "model.warm_start would train the weights that the adapter was made for, and it would no longer fit them; "
            "add model.warm_start=null",
        )
    if config.weights.transport != "memory" and config.model.dtype == "float32":
        yield Problem("model.dtype", "vLLM computes adapters on GPUs in 16 bits, not in float32; use bfloat16")
    if lora.rank > SLOT_RANKS[-1]:
        yield Problem(
            "model.lora.rank", f"{lora.rank} fits no engine: the largest slot has rank {SLOT_RANKS[-1]}; use at most it"
        )
    if not lora.targets:
        yield Problem(
            "model.lora.targets", f"names no layer, so nothing would be trained; choose of {', '.join(LINEAR)}"
        )
    for target in lora.targets:
        if target in ("embed_tokens", "lm_head"):
            yield Problem(
                "model.lora.targets",
                f"{target} would untie output head and embedding, and no log-probability of a prompt would hold in the "
                "engine; leave it out",
            )
        elif target not in LINEAR:
            near = difflib.get_close_matches(target, LINEAR, n=1)
            hint = f"did you mean {near[0]}?" if near else f"choose of {', '.join(LINEAR)}"
            hint = "leave targets out, which names all of them" if target == ALL else hint
            yield Problem("model.lora.targets", f"{target!r:.80} is no linear layer of a decoder layer; {hint}")


def _one_dataset(config: Config) -> Iterator[Problem]:
    data = config.data
    given = {"train": data.train is not None, "make_rows": data.make_rows is not None, "mixture": bool(data.mixture)}
    named = [name for name, is_given in given.items() if is_given]
    if not named:
        yield Problem("data.train", "there are no prompts; give a JSONL or parquet file, or data.make_rows=N")
    if len(named) > 1:
        others = " and ".join(f"data.{name}" for name in named[1:])
        unset = " or ".join(f"data.{name}=null" for name in named if name != "mixture")
        yield Problem(
            f"data.{named[0]}",
            f"{others} is set too, so it is open which rows are meant; keep one of them: add {unset}",
        )
    if data.eval_every and not data.eval and data.eval_make_rows is None:
        yield Problem("data.eval_every", "there is no evaluation set; give data.eval or data.eval_make_rows, or 0")


def _curriculum(config: Config) -> Iterator[Problem]:
    curriculum = config.data.curriculum
    if curriculum is not None and curriculum.band[0] > curriculum.band[1]:
        low, high = curriculum.band
        yield Problem(
            "data.curriculum.band",
            f"[{low:g}, {high:g}] holds no success: every prompt would be passed over; give the lower end first",
        )


def _evaluation(config: Config) -> Iterator[Problem]:
    if config.data.eval_make_rows is not None and MADE_SET in config.data.eval:
        yield Problem(
            "data.eval_make_rows",
            f"the made set would take the place of data.eval.{MADE_SET}, which would never be played; give that one "
            "another name",
        )
    if config.data.eval_mode == "beside" and not config.data.eval_every:
        yield Problem(
            "data.eval_mode",
            "beside says how evaluations during training are done, but data.eval_every is 0, so there are none; give "
            "the steps between two of them, or leave eval_mode out",
        )
    engines, evaluating = config.generator.min_engines, config.data.eval_engines
    if config.data.eval_every and config.data.eval_mode == "beside" and engines <= evaluating:
        yield Problem(
            "data.eval_mode",
            f"beside lets {evaluating} of at least {engines} engines evaluate, so none may be left to go on with "
            f"training; set generator.engines, or its min, to {evaluating + 1} or more, or data.eval_mode=pause",
        )
    every, sync_every = config.data.eval_every, config.weights.sync_every
    if every % sync_every:
        yield Problem(
            "data.eval_every",
            f"{every} is no multiple of weights.sync_every ({sync_every}): the engines would be evaluated on older "
            "weights than those of the step",
        )


def _agents(config: Config) -> Iterator[Problem]:
    if config.endpoint is None:
        return
    if not config.algorithm.step_wise:
        yield Problem(
            "algorithm.step_wise",
            "false makes one sequence of each trajectory, but the calls of an agent may branch: such trajectories "
            "would all be refused; use true",
        )
    if "main" not in config.endpoint.train:
        yield Problem(
            "agents.train",
            "without main the agents' own conversations would not be trained; add it",
        )


def _roles(config: Config) -> Iterator[Problem]:
    if config.roles and not config.algorithm.step_wise:
        yield Problem(
            "algorithm.step_wise",
            "false makes one sequence of each trajectory, but every role has a conversation of its own; use true",
        )
    for name, role in config.roles.items():
        if name in ROLES:
            yield Problem(
                f"roles.{name}",
                "is there in every run and always trained; give the further role another name"
                if name == Role.MAIN
                else f"is the name of a kind of an agent's calls, as are {', '.join(ROLES)}; give another name",
            )
        if role.mode != "frozen" and (role.url or role.model or role.key_file or role.gpus):
            yield Problem(
                f"roles.{name}",
                f"url, model, key_file and gpus are those of another model, but with mode={role.mode} the policy plays "
                "the role, so that model would never be asked; use mode=frozen, or leave them out",
            )
        if role.mode == "frozen" and role.model is None:
            yield Problem(
                f"roles.{name}", "is frozen, but nothing says who plays it; give model (a folder), or url and model"
            )
        elif role.mode == "frozen" and role.url is not None and role.gpus:
            yield Problem(f"roles.{name}.gpus", "are of an engine of this run, but url names another one; use 0")
        elif role.is_served and role.key_file is not None:
            yield Problem(f"roles.{name}.key_file", "is for url, which is not set; leave it out")
        elif role.url is not None and not _is_address(role.url):
            yield Problem(f"roles.{name}.url", f"{role.url!r} is no address; give http://HOST:PORT/v1")


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # brackets without an address, or a port beyond the last one
        return False


def _sampling(config: Config) -> Iterator[Problem]:
    generator = config.generator
    neutral = {
        "top_p": (1.0,),
        "top_k": (-1, 0),
        "min_p": (0.0,),
        "repetition_penalty": (1.0,),
        "presence_penalty": (0.0,),
        "frequency_penalty": (0.0,),
    }
    for name, values in neutral.items():
        value = getattr(generator, name)
        if value not in values:
            yield Problem(
                f"generator.{name}",
                f"{value:g} changes the sampling distribution in a way that the trainer cannot recompute, so every "
                f"importance ratio would be wrong; use {values[0]:g} while training",
            )


def _concurrency(config: Config) -> Iterator[Problem]:
    size, concurrent = config.trainer.mini_batch_size, config.generator.concurrent_groups
    if concurrent < size:
        yield Problem(
            "generator.concurrent_groups",
            f"{concurrent} is below trainer.mini_batch_size ({size}): a mini-batch would be generated in several "
            f"rounds, one after the other; use at least {size}",
        )
    if concurrent < (engines := config.generator.max_engines):
        yield Problem(
            "generator.concurrent_groups",
            f"{concurrent} groups cannot keep {engines} engines busy; some would never get work",
        )
    if config.generator.min_engines > engines:
        yield Problem("generator.engines", f"min is {config.generator.min_engines}, which is more than max, {engines}")


def _staleness(config: Config) -> Iterator[Problem]:
    buffer, sync_every = config.buffer, config.weights.sync_every
    if buffer.lookahead == "auto":
        return
    if buffer.max_staleness < buffer.lookahead:
        yield Problem(
            "buffer.max_staleness",
            f"{buffer.max_staleness} is below buffer.lookahead ({buffer.lookahead}): tokens that were admitted on "
            "purpose would be masked at training, so their generation is wasted; raise it, or lower lookahead",
        )
    if buffer.lookahead < sync_every - 1:
        yield Problem(
            "buffer.lookahead",
            f"{buffer.lookahead} is below weights.sync_every - 1 ({sync_every - 1}): the generators would wait for "
            "weights that come only after mini-batches which they may not begin, a deadlock; "
            f"use at least {sync_every - 1}",
        )


def _bytes(config: Config, experts_per_token: int = 0) -> Iterator[Problem]:
    """Bounds of memory and journal; `experts_per_token` is known once the model has been read."""
    buffer, samples, size = config.buffer, config.algorithm.n_samples_per_prompt, config.trainer.mini_batch_size
    worst = worst_bytes(config, experts_per_token)
    one_turn = samples * (worst.step + ITEM_BYTES)
    if buffer.max_group_bytes < one_turn:
        yield Problem(
            "buffer.max_group_bytes",
            f"{buffer.max_group_bytes} cannot hold one turn of each of the {samples} samples of a group at worst "
            f"({one_turn} bytes): long groups would all be refused, so the policy would learn to be short; raise it",
        )
    mini_batch = size * worst.group
    if buffer.max_bytes < mini_batch:
        yield Problem(
            "buffer.max_bytes",
            f"{buffer.max_bytes} cannot hold the {size} groups of a mini-batch at worst ({mini_batch} bytes): "
            "admission would stop before a mini-batch is complete, a deadlock",
        )
    every, kept = config.trainer.checkpoint_every, config.trainer.keep_checkpoints
    journal = worst.journal(max(every * kept, 1) * size)
    if buffer.max_journal_bytes < journal:
        held = f"the {every * kept} mini-batches since the oldest checkpoint that is kept" if every else "a mini-batch"
        yield Problem(
            "buffer.max_journal_bytes",
            f"{buffer.max_journal_bytes} cannot hold {held} at worst ({journal} bytes): the journal would fill before "
            "it may forget, and the run would stop; raise it"
            + (", write checkpoints more often, or keep fewer" if every else ""),
        )


def _merge(config: Config) -> Iterator[Problem]:
    step_wise, merge = config.algorithm.step_wise, config.buffer.merge
    if merge != "off" and not step_wise:
        yield Problem(
            "buffer.merge",
            f"{merge} needs algorithm.step_wise=true: without it a trajectory is one sequence already and there are "
            "no steps to merge; use buffer.merge=off",
        )
    if not step_wise and config.generator.conversation == "rerender":
        yield Problem(
            "generator.conversation",
            "rerender lets the chat template rewrite earlier turns, so a trajectory is no single sequence; use append "
            "or inline, or algorithm.step_wise=true",
        )


def _user_functions(config: Config) -> Iterator[Problem]:
    """Names of functions; whether a module of the user registers a name is known only when the module is imported."""
    for name, known in (("estimator", (*GROUP_ESTIMATORS, *TEMPORAL_ESTIMATORS)), ("loss", LOSSES)):
        if wrong := malformed_name(name, getattr(config.algorithm, name), known):
            yield Problem(f"algorithm.{name}", wrong)


def _quantization(config: Config) -> Iterator[Problem]:
    if config.generator.quantization is not None and not config.algorithm.correction.is_on:
        yield Problem(
            "generator.quantization",
            f"{config.generator.quantization} engines sample from another distribution than the trainer computes, and "
            "nothing corrects for it: training would drift away; set algorithm.correction.token_band=[0.5,2.0], or "
            "truncate with algorithm.anchor=proximal, or generator.quantization=null",
        )


def _store(config: Config) -> Iterator[Problem]:
    if config.run.store is not None and (wrong := store_url_problem(config.run.store)) is not None:
        yield Problem("run.store", wrong)


RULES: tuple[Callable[[Config], Iterator[Problem]], ...] = (
    _store,
    _one_model,
    _warm_start,
    _lora,
    _one_dataset,
    _curriculum,
    _evaluation,
    _agents,
    _roles,
    check_command,
    _sampling,
    _concurrency,
    _staleness,
    _bytes,
    _merge,
    _user_functions,
    *ALGORITHM_RULES,
    _quantization,
    *TRAINER_RULES,
)
"""One rule a subject, in the order of the tree."""
