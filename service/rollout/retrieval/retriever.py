"""Search in a corpus, by words or by an encoder's vectors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import NamedTuple, Protocol

import psutil

from service.config.rollout import RetrievalConfig
from service.errors import UserError
from service.rollout.retrieval.corpus import Passage, load_corpus
from service.rollout.retrieval.words import WordIndex, check_memory
from service.types import Float32s, Int64s


class Hit(NamedTuple):
    """A passage that was found."""

    passage: Passage
    score: float
    """Inner product of the query's and the passage's vectors."""


class Index(Protocol):
    """Finds the nearest of many passages."""

    def search(self, queries: Sequence[str], topk: int) -> tuple[Float32s, Int64s]:
        """[Q, topk] scores, largest first, and [Q, topk] numbers of the passages."""


@dataclass(frozen=True, slots=True)
class Retriever:
    """A corpus with its index."""

    passages: Sequence[Passage]
    index: Index

    @staticmethod
    def by_words(corpus: Path) -> Retriever:
        """Read a corpus and index its words.

        Raises:
            UserError: the file is missing or malformed, or too large for the memory that is free.
        """
        if corpus.is_file():
            check_memory(corpus, psutil.virtual_memory().available)
        passages = load_corpus(corpus)
        return Retriever(passages, WordIndex([passage.contents for passage in passages]))

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """The `topk` nearest passages of each query, nearest first."""
        scores, numbers = self.index.search(queries, min(topk, len(self.passages)))
        return [
            [Hit(self.passages[number], score) for score, number in zip(row, nearest, strict=True)]
            for row, nearest in zip(scores.tolist(), numbers.tolist(), strict=True)
        ]


def check_retriever(config: RetrievalConfig) -> None:
    """Raises `UserError` where settings contradict each other, or this machine's memory cannot hold the words."""
    if config.encoder is not None:
        return
    if config.embeddings is not None:
        raise UserError("embeddings: only an encoder makes vectors; give an encoder, or no embeddings")
    if config.corpus is not None and config.corpus.is_file():
        check_memory(config.corpus, psutil.virtual_memory().total)


def open_retriever(config: RetrievalConfig, device: str) -> Retriever:
    """Read the corpus, and encode it unless its vectors are in a file.

    Raises:
        UserError: a file is missing or malformed, something has too little memory, or `device` cannot be used.
    """
    check_retriever(config)
    corpus = config.corpus or Path(str(resources.files("examples.data") / "corpus.jsonl"))
    if config.encoder is None:
        return Retriever.by_words(corpus)
    import torch  # a server without an encoder starts faster without torch

    from service.rollout.retrieval.dense import DenseEncoder, DenseIndex, encoded

    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # AssertionError where torch was built without the device
        raise UserError(f"the encoder cannot run on {device!r}: {error}; give cpu") from error
    torch.set_num_threads(config.cpus)  # Ray sets OMP_NUM_THREADS
    passages, on = load_corpus(corpus), torch.device(device)
    encoder = DenseEncoder(config.encoder, on, config.query_prefix, config.passage_prefix)
    vectors = encoded([passage.contents for passage in passages], encoder, config.embeddings)
    return Retriever(passages, DenseIndex(encoder, vectors, on))
