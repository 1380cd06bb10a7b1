"""Checks of the rollout settings: model, datasets, evaluation, retrieval, sampling, concurrency."""

from __future__ import annotations

from collections.abc import Iterator

from service.config.problem import Problem, Rule
from service.config.rollout import MADE_SET
from service.config.tree import Config


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


def _evaluation(config: Config) -> Iterator[Problem]:
    if config.data.eval_make_rows is not None and MADE_SET in config.data.eval:
        yield Problem(
            "data.eval_make_rows",
            f"the made set would take the place of data.eval.{MADE_SET}, which would never be played; give that one "
            "another name",
        )
    every, sync_every = config.data.eval_every, config.weights.sync_every
    if every % sync_every:
        yield Problem(
            "data.eval_every",
            f"{every} is no multiple of weights.sync_every ({sync_every}): the engines would be evaluated on older "
            "weights than those of the step",
        )


def _retrieval(config: Config) -> Iterator[Problem]:
    if config.env.retrieval is not None and "url" in config.env.options:
        yield Problem(
            "env.retrieval",
            "env.options.url names a server already, so the one that the run starts would never be asked; keep one",
        )


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
    if concurrent < config.generator.engines:
        yield Problem(
            "generator.concurrent_groups",
            f"{concurrent} groups cannot keep {config.generator.engines} engines busy; some would never get work",
        )


RULES: tuple[Rule, ...] = (
    _one_model,
    _warm_start,
    _one_dataset,
    _evaluation,
    _retrieval,
    _sampling,
    _concurrency,
)
