"""Checks of the learning settings: names of functions, estimator, reduction, correction, packing, placement."""

from __future__ import annotations

from collections.abc import Iterator

from service.config.problem import Problem, Rule
from service.config.tree import Config
from service.interop.user_functions import malformed_name

GROUP_ESTIMATORS = ("grpo", "grpo_no_std", "rloo", "maxrl", "reinforce++_baseline")
TEMPORAL_ESTIMATORS = ("gae", "reinforce++")
LOSSES = (
    "ppo_clip", "dual_clip", "cispo", "gspo", "rollout_is", "importance_sampling", "cross_entropy"
)  # fmt: skip


def _user_functions(config: Config) -> Iterator[Problem]:
    """Names of functions; whether a module of the user registers a name is known only when the module is imported."""
    for name, known in (("estimator", (*GROUP_ESTIMATORS, *TEMPORAL_ESTIMATORS)), ("loss", LOSSES)):
        if wrong := malformed_name(name, getattr(config.algorithm, name), known):
            yield Problem(f"algorithm.{name}", wrong)


def _estimator(config: Config) -> Iterator[Problem]:
    algorithm = config.algorithm
    if algorithm.step_wise and algorithm.estimator in TEMPORAL_ESTIMATORS:
        yield Problem(
            "algorithm.estimator",
            f"{algorithm.estimator} discounts along one token axis, but step-wise rows are separate sequences: the "
            "chain would break at every row, and rewards would not reach earlier steps; use an outcome estimator "
            f"({', '.join(GROUP_ESTIMATORS)})",
        )
    elif algorithm.estimator == "gae":
        yield Problem(
            "algorithm.estimator",
            "gae needs a value model, which Baton does not train; use reinforce++ or an outcome estimator "
            f"({', '.join(GROUP_ESTIMATORS)})",
        )
    if algorithm.estimator in GROUP_ESTIMATORS and algorithm.n_samples_per_prompt == 1:
        yield Problem(
            "algorithm.n_samples_per_prompt",
            f"1 makes groups of one: {algorithm.estimator} compares the trajectories of a group, so every advantage "
            "would be zero and nothing would be learned; use at least 2",
        )


def _reduction(config: Config) -> Iterator[Problem]:
    if config.algorithm.reduction == "sequence_mean" and config.algorithm.step_wise and config.buffer.merge != "off":
        yield Problem(
            "algorithm.reduction",
            "sequence_mean counts rows, and merging changes how many rows a trajectory has, so the loss would depend "
            "on tokenisation; use trajectory_mean, or buffer.merge=off on purpose",
        )


def _correction(config: Config) -> Iterator[Problem]:
    algorithm = config.algorithm
    if algorithm.correction.truncate != "off" and algorithm.anchor == "rollout":
        yield Problem(
            "algorithm.correction.truncate",
            f"{algorithm.correction.truncate} weighs by the ratio to the rollout; with algorithm.anchor=rollout the "
            "loss has that ratio already: it would count twice; use algorithm.anchor=proximal, or truncate=off",
        )
    for name in ("token_band", "sequence_band", "geometric_band", "outlier_band"):
        band = getattr(algorithm.correction, name)
        if band is not None and band[0] >= band[1]:
            yield Problem(
                f"algorithm.correction.{name}",
                f"[{band[0]:g}, {band[1]:g}] holds no ratio: every token would be masked; give the lower end first",
            )


def _packing(config: Config) -> Iterator[Problem]:
    generator, trainer = config.generator, config.trainer
    longest = generator.max_input_length + generator.max_generate_length
    if trainer.max_tokens_per_micro_batch < longest:
        yield Problem(
            "trainer.max_tokens_per_micro_batch",
            f"{trainer.max_tokens_per_micro_batch} is below generator.max_input_length + max_generate_length "
            f"({longest}): the longest row would fit into no micro-batch; use at least {longest}",
        )
    trajectories = trainer.mini_batch_size * config.algorithm.n_samples_per_prompt
    if trajectories < trainer.ranks:
        yield Problem(
            "trainer.ranks",
            f"{trainer.ranks} ranks share {trajectories} trajectories a mini-batch: some ranks would never have a row "
            "to train; raise trainer.mini_batch_size, or use fewer ranks",
        )


def _verification(config: Config) -> Iterator[Problem]:
    if config.weights.verify and config.weights.kv_cache == "keep":
        yield Problem(
            "weights.verify",
            "tokens that continue on a kept KV cache come from two policies at once, which no trainer can compute; "
            "set weights.kv_cache=recompute",
        )


def _shared_gpus(config: Config) -> Iterator[Problem]:
    if config.weights.transport != "ipc":
        return
    engines, ranks = config.generator.engines, config.trainer.ranks
    if config.generator.tensor_parallel_size > 1:
        yield Problem(
            "generator.tensor_parallel_size",
            f"{config.generator.tensor_parallel_size} GPUs make up an engine, but weights.transport=ipc hands weights "
            "over within one GPU: the engine's other GPUs would keep old ones; use 1, or another transport",
        )
    if engines > ranks:
        yield Problem(
            "generator.engines",
            f"{engines} are more than trainer.ranks ({ranks}), and with weights.transport=ipc each engine shares the "
            "GPU of a rank: some would never be placed; use at most as many, or another transport",
        )


RULES: tuple[Rule, ...] = (
    _user_functions,
    _estimator,
    _reduction,
    _correction,
    _packing,
    _verification,
    _shared_gpus,
)
