"""The checks of the trainer's ranks: what they share, and what they share GPUs with."""

from __future__ import annotations

from collections.abc import Iterator

from service.config.model_folder import undivided_heads
from service.config.problem import Problem
from service.config.tree import Config


def _packing(config: Config) -> Iterator[Problem]:
    generator, trainer = config.generator, config.trainer
    longest = generator.max_input_length + generator.max_generate_length
    if trainer.tokens_of_micro_batch < longest:
        sharing = f", of {trainer.sequence_parallel} ranks together," if trainer.sequence_parallel > 1 else ""
        yield Problem(
            "trainer.max_tokens_per_micro_batch",
            f"{trainer.tokens_of_micro_batch}{sharing} is below generator.max_input_length + max_generate_length "
            f"({longest}): the longest row would fit into no micro-batch; use at least "
            f"{-(-longest // trainer.sequence_parallel)}, or let more ranks share a row (trainer.sequence_parallel)",
        )
    trajectories = trainer.mini_batch_size * config.algorithm.n_samples_per_prompt
    if trajectories < trainer.batch_parts:
        yield Problem(
            "trainer.ranks",
            f"{trainer.ranks} ranks share {trajectories} trajectories a mini-batch: some ranks would never have a row "
            "to train; raise trainer.mini_batch_size, or use fewer ranks",
        )


def _sequence_parallel(config: Config) -> Iterator[Problem]:
    trainer, make = config.trainer, config.model.make
    if trainer.ranks % trainer.sequence_parallel:
        yield Problem(
            "trainer.sequence_parallel",
            f"trainer.ranks ({trainer.ranks}) do not divide into groups of {trainer.sequence_parallel} that share "
            "micro-batches: some ranks would belong to none; use a divisor",
        )
    if trainer.sequence_parallel > 1 and trainer.layout == "padded":
        yield Problem(
            "trainer.layout",
            "padded rows lie on lines of their own, which trainer.sequence_parallel cannot cut; use packed, "
            "shared_prefix or auto",
        )
    if make and (reason := undivided_heads(make.num_heads, make.num_kv_heads, trainer.sequence_parallel)):
        yield Problem("trainer.sequence_parallel", reason)


def _verification(config: Config) -> Iterator[Problem]:
    if config.weights.verify and config.weights.kv_cache == "keep":
        yield Problem(
            "weights.verify",
            "tokens that continue on a kept KV cache come from two policies at once, which no trainer can compute; "
            "set weights.kv_cache=recompute",
        )


def _delta(config: Config) -> Iterator[Problem]:
    if not config.weights.delta:
        return
    if config.weights.transport != "memory":
        yield Problem(
            "weights.delta",
            f"finds what changed in the copies of weights.transport=memory, which {config.weights.transport} does not "
            "make; set weights.transport=memory, or weights.delta=false",
        )
    if config.model.lora is not None:
        yield Problem(
            "weights.delta",
            "nothing would be saved: with model.lora only the adapter travels, and all of it changes in each step; set "
            "weights.delta=false",
        )


def _shared_gpus(config: Config) -> Iterator[Problem]:
    if config.weights.transport != "ipc":
        return
    engines, ranks = config.generator.max_engines, config.trainer.ranks
    if config.generator.min_engines < engines:
        yield Problem(
            "generator.engines",
            "with weights.transport=ipc each engine shares the GPU of a rank, so that none can join or leave; give a "
            "number, or another transport",
        )
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
    if config.generator.kv_cache_bytes is None:
        yield Problem(
            "generator.kv_cache_bytes",
            "is not set, and with weights.transport=ipc the engine would size its KV cache by the memory that is free "
            "while the rank beside it loads; set it",
        )


RULES = (_packing, _sequence_parallel, _verification, _delta, _shared_gpus)
"""One rule a subject, in the order of the tree."""
