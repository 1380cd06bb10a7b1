"""Checks of `algorithm`, whose parts have to fit one another, and of `scorers`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from service.config.problem import Problem
from service.config.tree import Config
from service.handoff.batches.credit import TURN_ESTIMATORS, not_by_turn
from service.handoff.batches.score import GROUP_ESTIMATORS
from service.user_code import is_module_and_name

TEMPORAL_ESTIMATORS = ("gae", "reinforce++")


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


def _credit(config: Config) -> Iterator[Problem]:
    algorithm = config.algorithm
    if algorithm.credit == "trajectory":
        return
    if algorithm.returns != "sum":
        yield Problem(
            "algorithm.credit",
            f"{algorithm.credit} adds up the rewards of turns, but algorithm.returns={algorithm.returns} ignores all "
            "rewards but the last: metrics and filters would count other returns than are trained; use returns=sum",
        )
    if algorithm.estimator not in TURN_ESTIMATORS:
        yield Problem(
            "algorithm.credit",
            f"{algorithm.credit} needs an advantage of each turn, but {algorithm.estimator} "
            f"{not_by_turn(algorithm.estimator)}, or credit=trajectory",
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


def _one_way(config: Config) -> Iterator[Problem]:
    for name, scorer in config.scorers.items():
        path, teaches = f"scorers.{name}", scorer.kind == "teacher"
        given = [way for way in ("use", "url", "model") if getattr(scorer, way) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none of them"
            yield Problem(path, f"set one of use, url and model, not {found}: it is open who scores")
        if scorer.use is not None and not is_module_and_name(scorer.use):
            yield Problem(f"{path}.use", f"{scorer.use!r} is no module:name, so nothing could be imported")
        if scorer.model is not None and not teaches:
            yield Problem(f"{path}.model", "an engine gives log-probabilities and no rewards; set kind=teacher, or use")
        if teaches and scorer.url is not None and scorer.tokenizer is None:
            yield Problem(
                f"{path}.tokenizer",
                "is not set, so nobody could see whether the teacher at the address reads the same token ids; give the "
                "folder of its tokenizer",
            )


def _teacher(config: Config) -> Iterator[Problem]:
    algorithm = config.algorithm
    teacher, teachers = algorithm.teacher, [name for name, s in config.scorers.items() if s.kind == "teacher"]
    if teacher is None:
        for name in teachers:
            yield Problem(f"scorers.{name}.kind", "teacher, but without algorithm.teacher nothing is learned from it")
        return
    if not teachers:
        yield Problem("algorithm.teacher", "there is no teacher to learn from; give a scorer with kind=teacher")
    if len(teachers) > 1 and teacher.column is None:
        yield Problem(
            "algorithm.teacher.column",
            f"is not set, so it is open which of {', '.join(teachers)} teaches a row; name a column of the dataset",
        )
    if config.generator.temperature != 1.0:
        yield Problem(
            "generator.temperature",
            f"{config.generator.temperature:g}, but a teacher's log-probabilities are those at temperature 1, so the "
            "two could not be compared; use 1 with a teacher",
        )
    if algorithm.filter_zero_variance:
        yield Problem(
            "algorithm.filter_zero_variance",
            "removes groups whose returns are equal, from which a teacher would teach all the same; use false",
        )
    if teacher.mode == "advantage" and algorithm.loss == "cross_entropy":
        yield Problem("algorithm.teacher.mode", "advantage has no effect on cross_entropy; use kl, or another loss")


RULES: tuple[Callable[[Config], Iterator[Problem]], ...] = (
    _estimator,
    _credit,
    _reduction,
    _correction,
    _one_way,
    _teacher,
)
