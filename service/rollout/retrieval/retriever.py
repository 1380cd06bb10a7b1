"""Search in a corpus: an encoder turns texts into vectors, a flat index finds the largest inner products."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module, resources
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from service.config.rollout import RetrievalConfig
from service.errors import UserError
from service.files import atomic_file
from service.rollout.environment import is_text
from service.types import Float32s, Int64s

WORD = re.compile(r"\w+")


class Passage(NamedTuple):
    """One document of a corpus."""

    id: str
    contents: str


class Hit(NamedTuple):
    """A passage that was found."""

    passage: Passage
    score: float
    """Inner product of the query's and the passage's vectors."""


class Encoder(Protocol):
    """Turns texts into vectors of length 1."""

    def passages(self, texts: Sequence[str]) -> Float32s:
        """[n, d] vectors of passages."""

    def queries(self, texts: Sequence[str]) -> Float32s:
        """[n, d] vectors of queries."""


class Index(Protocol):
    """Finds the nearest of many vectors."""

    def search(self, queries: Float32s, topk: int) -> tuple[Float32s, Int64s]:
        """[n, topk] inner products, largest first, and [n, topk] row numbers of their vectors."""


class WordEncoder:
    """TF-IDF vectors: finds passages that share words with the query, rare words counting more; needs no model."""

    def __init__(self, corpus: Sequence[str]) -> None:
        documents = Counter(word for text in corpus for word in set(_words(text)))
        self._columns = {word: i for i, word in enumerate(sorted(documents))}
        counts = np.array([documents[word] for word in self._columns], dtype=np.float32)
        self._idf = np.log((1 + len(corpus)) / (1 + counts)) + 1

    def passages(self, texts: Sequence[str]) -> Float32s:
        """[n, words] vectors."""
        vectors = np.zeros((len(texts), len(self._columns)), dtype=np.float32)
        for i, text in enumerate(texts):
            for word, count in Counter(_words(text)).items():
                if word in self._columns:
                    vectors[i, self._columns[word]] = count * self._idf[self._columns[word]]
        vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-9)
        return vectors

    def queries(self, texts: Sequence[str]) -> Float32s:
        """[n, words] vectors."""
        return self.passages(texts)


class NumpyIndex:
    """Exact search by one matrix product."""

    def __init__(self, vectors: Float32s) -> None:
        self._vectors = vectors

    def search(self, queries: Float32s, topk: int) -> tuple[Float32s, Int64s]:
        """As `Index.search`; equal scores in the order of the corpus."""
        scores = queries @ self._vectors.T
        nearest = np.argsort(-scores, axis=1, kind="stable")[:, :topk]
        return np.take_along_axis(scores, nearest, axis=1), nearest


def flat_index(vectors: Float32s) -> Index:
    """An exact index: FAISS's where it is installed (the extra `search`), else numpy's."""
    try:
        faiss = import_module("faiss")
    except ImportError:
        return NumpyIndex(vectors)
    index = faiss.IndexFlatIP(vectors.shape[1])
    index.add(np.ascontiguousarray(vectors))
    flat: Index = index
    return flat


@dataclass(frozen=True, slots=True)
class Retriever:
    """A corpus with its encoder and index."""

    passages: Sequence[Passage]
    encoder: Encoder
    index: Index

    @staticmethod
    def of(passages: Sequence[Passage], encoder: Encoder, embeddings: Path | None = None) -> Retriever:
        """Encode the corpus, or read its vectors from the file `embeddings` (.npy), which is written if missing.

        Raises:
            UserError: the file holds no vectors, or vectors of another corpus or encoder.
        """
        if embeddings is not None and embeddings.is_file():
            vectors = _load_vectors(embeddings, (len(passages), encoder.queries(["width"]).shape[1]))
        else:
            vectors = encoder.passages([passage.contents for passage in passages])
            if embeddings is not None:
                # An open file, because np.save appends .npy to a name without it.
                with atomic_file(embeddings) as partial, partial.open("wb") as file:
                    np.save(file, vectors)
        return Retriever(passages, encoder, flat_index(vectors))

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """The `topk` nearest passages of each query, nearest first."""
        scores, numbers = self.index.search(self.encoder.queries(queries), min(topk, len(self.passages)))
        return [
            [Hit(self.passages[number], score) for score, number in zip(row, nearest, strict=True)]
            for row, nearest in zip(scores.tolist(), numbers.tolist(), strict=True)
        ]


def _load_vectors(path: Path, shape: tuple[int, int]) -> Float32s:
    try:
        vectors: Float32s = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} holds no vectors ({error}); remove it") from error
    if vectors.shape != shape or vectors.dtype != np.float32:
        found = f"vectors of {vectors.dtype} {list(vectors.shape)}"
        raise UserError(f"{path} has {found}, this corpus and encoder have float32 {list(shape)}; remove it")
    return vectors


def open_retriever(config: RetrievalConfig, device: str) -> Retriever:
    """Read the corpus, and encode it unless its vectors are in a file.

    Raises:
        UserError: a file is missing or malformed, or the encoder cannot run on `device`.
    """
    passages = load_corpus(config.corpus or Path(str(resources.files("examples.data") / "corpus.jsonl")))
    if config.encoder is None:
        return Retriever.of(passages, WordEncoder([passage.contents for passage in passages]), config.embeddings)
    import torch  # a server without an encoder starts faster without torch

    from service.rollout.retrieval.dense import DenseEncoder

    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # AssertionError where torch was built without the device
        raise UserError(f"the encoder cannot run on {device!r}: {error}; give cpu") from error
    encoder = DenseEncoder(config.encoder, torch.device(device), config.query_prefix, config.passage_prefix)
    return Retriever.of(passages, encoder, config.embeddings)


def load_corpus(path: Path) -> list[Passage]:
    """The passages of a JSONL file with `id` and `contents` in each row.

    Raises:
        UserError: the file is missing, empty or malformed; the message names file and row.
    """
    if not path.is_file():
        raise UserError(f"corpus: there is no file {path}")
    passages: list[Passage] = []
    try:
        with path.open(encoding="utf-8") as file:
            for line in file:
                document = json.loads(line)
                if not is_text(document["contents"]):
                    raise TypeError("contents is no text")
                passages.append(Passage(str(document["id"]), document["contents"]))
    except UnicodeDecodeError as error:
        raise UserError(f"corpus: {path}, row {len(passages)} or one soon after it: not UTF-8: {error}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        place = f"corpus: {path}, row {len(passages)}"
        raise UserError(f"{place}: give an object with id and contents ({error})") from error
    if not passages:
        raise UserError(f"corpus: {path} has no rows")
    return passages


def _words(text: str) -> list[str]:
    return WORD.findall(text.lower())
