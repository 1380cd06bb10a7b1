"""Refuses combinations of settings with which a run would deadlock, lose data or train wrongly.

The field types of a section check single values; the rules in this module check several settings together. A rule
yields one line per problem, of the form `setting: consequence and what to do`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from service.config.core_settings import worst_bytes
from service.config.engine_options import refusals
from service.config.rollout import AGENT, MADE_SET, OWN_VARIABLES
from service.config.source import ConfigSource
from service.config.tree import Config
from service.errors import ConfigError
from service.handoff.batches.estimators import GROUP_ESTIMATORS, NOT_BY_TURN, TURN_ESTIMATORS
from service.handoff.group_bytes import ITEM_BYTES
from service.handoff.steps.values import ROLES, Role
from service.model_folder import undivided_heads
from service.store_url import store_url_problem
from service.types import MAX_SUPPORT, max_support
from service.user_code import is_module_and_name, malformed_name

LOSSES = (
    "ppo_clip", "dual_clip", "cispo", "gspo", "rollout_is", "importance_sampling", "cross_entropy"
)  # fmt: skip


def check(config: Config, source: ConfigSource | None = None, unused: tuple[str, ...] = ()) -> None:
    """Raises `ConfigError` with a line for each combination of settings that cannot work, and the place in `source`
    that set it. Errors about unused settings are left out: `unused` has the prefixes of their names."""
    _refuse((problem for problem in problems(config) if not problem.startswith(unused)), source)


def check_bytes(config: Config, expert_bytes: int) -> None:
    """Raises `ConfigError` with a line for each limit of memory or of the journal that is too small. `expert_bytes`:
    bytes of the recorded expert numbers of one token."""
    _refuse(_bytes(config, expert_bytes))


def problems(config: Config) -> list[str]:
    """One line for each refused combination of settings, in the order of the configuration tree."""
    return [problem for rule in RULES for problem in rule(config)]


def _refuse(lines: Iterable[str], source: ConfigSource | None = None) -> None:
    if text := "\n".join(lines):
        with (source or ConfigSource()).named_in_errors():
            raise ConfigError(text)


def _store(config: Config) -> Iterator[str]:
    if config.run.store is not None and (wrong := store_url_problem(config.run.store)) is not None:
        yield f"run.store: {wrong}"


def _model(config: Config) -> Iterator[str]:
    path, make, warm_start = config.model.path, config.model.make, config.model.warm_start
    if path is None and make is None:
        yield "model.path: there is no model to train; give a Hugging Face folder, or model.make={}"
    if path is not None and make is not None:
        yield "model.path: model.make is set too, so it is open which model is meant; add model.make=null"
    if warm_start is not None and warm_start.demonstrations < warm_start.batch_size:
        yield (
            f"model.warm_start.demonstrations: {warm_start.demonstrations} are fewer than batch_size "
            f"({warm_start.batch_size}): not even one batch could be drawn; make more of them, or use a smaller batch"
        )


def _adapter(config: Config) -> Iterator[str]:
    lora, adapter = config.model.lora, config.model.adapter
    if lora is None and adapter is not None:
        yield "model.adapter: without model.lora nothing would train it; add model.lora with its settings"
    if lora is not None and adapter is not None and config.model.warm_start is not None:
        yield (
            "model.adapter: model.warm_start would train the weights that the adapter was made for, and it would no "
            "longer fit them; add model.warm_start=null"
        )
    if lora is not None and config.weights.transport != "memory" and config.model.dtype == "float32":
        yield "model.dtype: vLLM computes adapters on GPUs in 16 bits, not in float32; use bfloat16"


def _data(config: Config) -> Iterator[str]:
    data = config.data
    given = {"train": data.train is not None, "make_rows": data.make_rows is not None, "mixture": bool(data.mixture)}
    named = [name for name, is_given in given.items() if is_given]
    if not named:
        yield "data.train: there are no prompts; give a JSONL or parquet file, or for RL data.make_rows=N"
    if len(named) > 1:
        others = " and ".join(f"data.{name}" for name in named[1:])
        unset = " or ".join(f"data.{name}=null" for name in named if name != "mixture")
        yield f"data.{named[0]}: {others} is set too, so it is open which rows are meant; keep one of them: add {unset}"
    if data.eval_every and not data.eval and data.eval_make_rows is None:
        yield "data.eval_every: there is no evaluation set; give data.eval or data.eval_make_rows, or 0"


def _evaluation(config: Config) -> Iterator[str]:
    data, every, sync_every = config.data, config.data.eval_every, config.weights.sync_every
    if data.eval_make_rows is not None and MADE_SET in data.eval:
        yield (
            f"data.eval_make_rows: the made set would take the place of data.eval.{MADE_SET}, which would never be "
            "played; give that one another name"
        )
    if every % sync_every:
        yield (
            f"data.eval_every: {every} is no multiple of weights.sync_every ({sync_every}): the engines would be "
            "evaluated with older weights than the step's"
        )


def _best(config: Config) -> Iterator[str]:
    data, best = config.data, config.run.keep_best
    if best is None:
        return
    sets = [*data.eval, *([MADE_SET] if data.eval_make_rows is not None else [])]
    scores = [f"eval/{name}/avg_score" for name in sets] if data.eval_every else []
    if best not in scores:
        yield f"run.keep_best: {best} is not measured in training, only {', '.join(scores) or 'none'}; see data.eval"


def _agents(config: Config) -> Iterator[str]:
    if config.endpoint is not None and "main" not in config.endpoint.train:
        yield "agents.train: without main the agents' own conversations would not be trained; add it"


def _roles(config: Config) -> Iterator[str]:
    for name, role in config.roles.items():
        if name == Role.MAIN:
            yield f"roles.{name}: is in every run and always trained; give your role another name"
        elif name in ROLES:
            kinds = ", ".join(ROLES)
            yield f"roles.{name}: is reserved for calls of agents, as are {kinds}; give another name"
        if role.mode != "frozen" and (role.url or role.model or role.key_file):
            yield (
                f"roles.{name}: url, model and key_file are those of another model, but with mode={role.mode} "
                "the policy plays the role, so that model would never be asked; use mode=frozen, or leave them out"
            )
        if role.mode == "frozen" and (role.url is None or role.model is None):
            yield f"roles.{name}: is frozen, but its model's address is missing; give url and model"


def _command(config: Config) -> Iterator[str]:
    """The refused settings of a command that is run as an agent."""
    env, endpoint = config.env, config.endpoint
    if env.name == AGENT and not env.command:
        yield f"env.command: is empty, so env.name={AGENT} has nothing to run; give a program and its arguments"
    if env.name != AGENT and env.command:
        yield f"env.command: would never run, because env.name is {env.name!r}; set env.name={AGENT}"
    seconds = env.limits.seconds + env.limits.score_seconds
    if env.name == AGENT and endpoint is not None and endpoint.deadline < seconds:
        yield (
            f"env.limits.seconds: with score_seconds ({seconds:g} together) exceeds agents.deadline "
            f"({endpoint.deadline:g}): a slow run would be lost before it is scored; lower it, or raise agents.deadline"
        )


def _words(config: Config) -> Iterator[str]:
    """The texts of a command: its environment variables and scoring function."""
    env, score = config.env, config.env.score
    if score == ():
        yield "env.score: is an empty command; give a program and its arguments, or null"
    elif isinstance(score, str):
        yield from _scoring_function(score, env.trusted_modules)
    for name in env.variables:
        if name in OWN_VARIABLES:
            yield f"env.variables.{name}: is set by Baton, to the session of each run; remove it"


def _scoring_function(score: str, trusted_modules: Iterable[str]) -> Iterator[str]:
    module = score.partition(":")[0]
    if not is_module_and_name(score):
        yield (
            f"env.score: {score!r} is no module:function, so nothing could be imported; a command is a list, such as "
            f"[{score}]"
        )
    elif not any(module == trusted or module.startswith(f"{trusted}.") for trusted in trusted_modules):
        yield f"env.score: {score!r} is not loaded, for env.trusted_modules does not name {module!r}"


def _generator(config: Config) -> Iterator[str]:
    generator, size = config.generator, config.trainer.mini_batch_size
    yield from refusals(generator.engine_options)
    concurrent, engines = generator.concurrent_groups, generator.max_engines
    if concurrent < size:
        yield (
            f"generator.concurrent_groups: {concurrent} is below trainer.mini_batch_size ({size}): a mini-batch would "
            f"be generated in several rounds, one after the other; use at least {size}"
        )
    if concurrent < engines:
        yield (
            f"generator.concurrent_groups: {concurrent} groups cannot keep {engines} engines busy; some would never "
            "get work"
        )
    if generator.min_engines > engines:
        yield f"generator.engines: min is {generator.min_engines}, which is more than max, {engines}"
    if generator.top_k == 1:
        yield "generator.top_k: 1 leaves one token to draw, so all samples are equal; use 0, for all tokens, or more"
    if generator.top_k > MAX_SUPPORT:
        yield f"generator.top_k: {generator.top_k} is more than {MAX_SUPPORT}, the most tokens of a support"
    if generator.quantization is not None and not config.algorithm.correction.is_on:
        yield (
            f"generator.quantization: {generator.quantization} engines sample from another distribution than the "
            "trainer computes, and nothing corrects for it: training would drift away; set "
            "algorithm.correction.token_band=[0.5,2.0], or truncate with algorithm.anchor=proximal, or "
            "generator.quantization=null"
        )


def _scorers(config: Config) -> Iterator[str]:
    for name, scorer in config.scorers.items():
        path, teaches = f"scorers.{name}", scorer.kind == "teacher"
        given = [way for way in ("use", "url", "model") if getattr(scorer, way) is not None]
        if len(given) != 1:
            ways = " and ".join(given) or "none of them"
            yield f"{path}: set one of use, url and model, not {ways}: it is open who scores"
        if scorer.use is not None and not is_module_and_name(scorer.use):
            yield f"{path}.use: {scorer.use!r} is no module:name, so nothing could be imported"
        if (scorer.model or scorer.url) is not None and not teaches:
            yield f"{path}: url and model give log-probabilities and no rewards; set kind=teacher, or use"
        if teaches and scorer.url is not None and scorer.tokenizer is None:
            yield (
                f"{path}.tokenizer: is not set, so it is unknown whether the teacher at the address reads the same "
                "token ids; give the folder of its tokenizer"
            )


def _staleness(config: Config) -> Iterator[str]:
    staleness, lookahead, sync_every = config.buffer.max_staleness, config.buffer.lookahead, config.weights.sync_every
    if staleness < lookahead:
        yield (
            f"buffer.max_staleness: {staleness} is below buffer.lookahead ({lookahead}): tokens that were admitted on "
            "purpose would be masked at training, so their generation is wasted; raise it, or lower lookahead"
        )
    if lookahead < sync_every - 1:
        yield (
            f"buffer.lookahead: {lookahead} is below weights.sync_every - 1 ({sync_every - 1}): the generators would "
            "wait for weights that come only after mini-batches which they may not begin, a deadlock; use at least "
            f"{sync_every - 1}"
        )


def _bytes(config: Config, expert_bytes: int = 0) -> Iterator[str]:
    """The limits of memory and journal that are too small. `expert_bytes` is known once the model has been read."""
    buffer, samples, size = config.buffer, config.algorithm.n_samples_per_prompt, config.trainer.mini_batch_size
    worst = worst_bytes(config, expert_bytes)
    one_turn = samples * (worst.step + ITEM_BYTES)
    is_wide = max_support(config.generator) and not config.generator.top_k
    supports = "; set generator.top_k, so that supports need less room" if is_wide else ""
    if buffer.max_group_bytes < one_turn:
        yield (
            f"buffer.max_group_bytes: {buffer.max_group_bytes} cannot hold one turn of each of the {samples} samples "
            f"of a group at worst ({one_turn} bytes): long groups would all be refused, so the policy would learn to "
            f"be short; raise it{supports}"
        )
    mini_batch = size * worst.group
    if buffer.max_bytes < mini_batch:
        yield (
            f"buffer.max_bytes: {buffer.max_bytes} cannot hold the {size} groups of a mini-batch at worst "
            f"({mini_batch} bytes): admission would stop before a mini-batch is complete, a deadlock{supports}"
        )
    every, kept = config.trainer.checkpoint_every, config.trainer.keep_checkpoints
    journal = worst.journal(max(every * kept, 1) * size)
    if buffer.max_journal_bytes < journal:
        held = f"the {every * kept} mini-batches since the oldest checkpoint that is kept" if every else "a mini-batch"
        more = ", write checkpoints more often, or keep fewer" if every else ""
        yield (
            f"buffer.max_journal_bytes: {buffer.max_journal_bytes} cannot hold {held} at worst ({journal} bytes): the "
            f"journal would fill before it may forget, and the run would stop; raise it{more}{supports}"
        )


def _estimator(config: Config) -> Iterator[str]:
    algorithm = config.algorithm
    # Only the import of a user's module shows which names it registers.
    if wrong := malformed_name("loss", algorithm.loss, LOSSES):
        yield f"algorithm.loss: {wrong}"
    if algorithm.estimator == "gae":
        yield (
            "algorithm.estimator: gae needs a value model, which Baton does not train, and discounts along one token "
            f"axis, but step-wise rows are separate sequences; use one of {', '.join(GROUP_ESTIMATORS)}"
        )
    elif wrong := malformed_name("estimator", algorithm.estimator, GROUP_ESTIMATORS):
        yield f"algorithm.estimator: {wrong}"
    if algorithm.estimator in GROUP_ESTIMATORS and algorithm.n_samples_per_prompt == 1:
        yield (
            f"algorithm.n_samples_per_prompt: 1 makes groups of one: {algorithm.estimator} compares the trajectories "
            "of a group, so every advantage would be zero and nothing would be learned; use at least 2"
        )


def _algorithm(config: Config) -> Iterator[str]:
    algorithm, credit, truncate = config.algorithm, config.algorithm.credit, config.algorithm.correction.truncate
    is_named = malformed_name("estimator", algorithm.estimator, GROUP_ESTIMATORS) is None
    if credit != "trajectory" and algorithm.returns != "sum":
        yield (
            f"algorithm.credit: {credit} adds up the rewards of turns, but algorithm.returns={algorithm.returns} "
            "ignores all rewards but the last: metrics and filters would count other returns than are trained; use "
            "returns=sum"
        )
    if credit != "trajectory" and algorithm.estimator not in TURN_ESTIMATORS and is_named:
        yield (
            f"algorithm.credit: {credit} needs an advantage of each turn, but {algorithm.estimator} "
            f"{NOT_BY_TURN}, or credit=trajectory"
        )
    if truncate != "off" and algorithm.anchor == "rollout":
        yield (
            f"algorithm.correction.truncate: {truncate} weighs by the ratio to the rollout; with "
            "algorithm.anchor=rollout the loss has that ratio already: it would count twice; use "
            "algorithm.anchor=proximal, or truncate=off"
        )


def _teacher(config: Config) -> Iterator[str]:
    algorithm, temperature = config.algorithm, config.generator.temperature
    teacher, teachers = algorithm.teacher, [name for name, s in config.scorers.items() if s.kind == "teacher"]
    if teacher is None:
        for name in teachers:
            yield f"scorers.{name}.kind: teacher, but without algorithm.teacher nothing is learned from it"
        return
    if not teachers:
        yield "algorithm.teacher: there is no teacher to learn from; give a scorer with kind=teacher"
    if len(teachers) > 1 and teacher.column is None:
        yield (
            f"algorithm.teacher.column: is not set, so it is open which of {', '.join(teachers)} teaches a row; name a "
            "column of the dataset"
        )
    if temperature != 1.0:
        yield (
            f"generator.temperature: {temperature:g}, but a teacher's log-probabilities are those at temperature 1, so "
            "the two could not be compared; use 1 with a teacher"
        )
    if max_support(config.generator):
        yield "generator.top_p: a teacher's log-probabilities are those among all tokens; use no top_p, top_k or min_p"
    if algorithm.filter_zero_variance:
        yield (
            "algorithm.filter_zero_variance: removes groups whose returns are equal, from which a teacher would teach "
            "all the same; use false"
        )
    if teacher.mode == "advantage" and algorithm.loss == "cross_entropy":
        yield "algorithm.teacher.mode: advantage has no effect on cross_entropy; use kl, or another loss"


def _packing(config: Config) -> Iterator[str]:
    trainer, sharing = config.trainer, config.trainer.sequence_parallel
    longest = config.generator.longest_row
    if trainer.tokens_of_micro_batch < longest:
        together = f", of {sharing} ranks together," if sharing > 1 else ""
        yield (
            f"trainer.max_tokens_per_micro_batch: {trainer.tokens_of_micro_batch}{together} is below "
            f"generator.max_input_length + max_generate_length ({longest}): the longest row would fit into no "
            f"micro-batch; use at least {-(-longest // sharing)}, or let more ranks share a row "
            "(trainer.sequence_parallel)"
        )
    trajectories = trainer.mini_batch_size * config.algorithm.n_samples_per_prompt
    if trajectories < trainer.batch_parts:
        yield (
            f"trainer.ranks: {trainer.ranks} ranks share {trajectories} trajectories a mini-batch: some ranks would "
            "never have a row to train; raise trainer.mini_batch_size, or use fewer ranks"
        )
    if trainer.ranks % sharing:
        yield (
            f"trainer.sequence_parallel: trainer.ranks ({trainer.ranks}) do not divide into groups of {sharing} that "
            "share micro-batches: some ranks would belong to none; use a divisor"
        )
    if sharing > 1 and trainer.layout == "padded":
        yield (
            "trainer.layout: padded rows lie on lines of their own, which trainer.sequence_parallel cannot cut; use "
            "packed, shared_prefix or auto"
        )
    if config.model.make is not None:
        made = config.model.make.dimensions
        if reason := undivided_heads(made["num_attention_heads"], made["num_key_value_heads"], sharing):
            yield f"trainer.sequence_parallel: {reason}"


def _weights(config: Config) -> Iterator[str]:
    weights = config.weights
    if weights.verify and weights.kv_cache == "keep":
        yield (
            "weights.verify: tokens that continue on a kept KV cache come from two policies at once, which no trainer "
            "can compute; set weights.kv_cache=recompute"
        )
    if weights.verify and config.generator.quantization is not None:
        yield (
            f"weights.verify: {config.generator.quantization} engines differ from the trainer by more than rounding; "
            "set weights.verify=false or generator.quantization=null"
        )


def _shared_gpus(config: Config) -> Iterator[str]:
    if config.weights.transport != "ipc":
        return
    generator, ranks = config.generator, config.trainer.ranks
    if generator.min_engines < generator.max_engines:
        yield (
            "generator.engines: with weights.transport=ipc each engine shares the GPU of a rank, so that none can join "
            "or leave; give a number, or another transport"
        )
    if generator.engine_gpus > 1:
        yield (
            f"generator.tensor_parallel_size: {generator.engine_gpus} GPUs make up an engine, but "
            "weights.transport=ipc hands weights over within one GPU: the engine's other GPUs would keep old ones; use "
            "1, or another transport"
        )
    if generator.max_engines > ranks:
        yield (
            f"generator.engines: {generator.max_engines} are more than trainer.ranks ({ranks}), and with "
            "weights.transport=ipc each engine shares the GPU of a rank: some would never be placed; use at most as "
            "many, or another transport"
        )
    if generator.kv_cache_bytes is None:
        yield (
            "generator.kv_cache_bytes: is not set, and with weights.transport=ipc the engine would size its KV cache "
            "by the memory that is free while the rank beside it loads; set it"
        )


RULES: tuple[Callable[[Config], Iterator[str]], ...] = (
    _store, _model, _adapter, _data, _evaluation, _best, _agents, _roles, _command, _words, _generator, _scorers,
    _staleness, _bytes, _estimator, _algorithm, _teacher, _packing, _weights, _shared_gpus,
)  # fmt: skip
"""The rules, one for each subject, in the order of the configuration tree."""
