"""Passages by nearness: encoders turn text into vectors, a flat index finds those with the largest inner product."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from service.errors import UserError
from service.rollout.environment import is_text
from service.types import Float32s, Int64s

WORD = re.compile(r"\w+")


class Passage(NamedTuple):
    """One document of a corpus."""

    id: str
    contents: str


class Found(NamedTuple):
    """A passage and how near it is."""

    passage: Passage
    score: float


class Encoder(Protocol):
    """Text to vectors of length 1."""

    def passages(self, texts: Sequence[str]) -> Float32s:
        """[n, d] vectors of documents."""

    def queries(self, texts: Sequence[str]) -> Float32s:
        """[n, d] vectors of questions."""


class Index(Protocol):
    """The nearest of many vectors."""

    def search(self, queries: Float32s, topk: int) -> tuple[Float32s, Int64s]:
        """[n, topk] inner products, largest first, and the numbers of their vectors."""


class WordEncoder:
    """Words weighed by how rare they are in the corpus: needs no model, and finds what shares words."""

    def __init__(self, corpus: Sequence[str]) -> None:
        documents = Counter(word for text in corpus for word in set(_words(text)))
        self._columns = {word: i for i, word in enumerate(sorted(documents))}
        counts = np.array([documents[word] for word in self._columns], dtype=np.float32)
        self._rareness = np.log((1 + len(corpus)) / (1 + counts)) + 1

    def passages(self, texts: Sequence[str]) -> Float32s:
        """[n, words] vectors."""
        vectors = np.zeros((len(texts), len(self._columns)), dtype=np.float32)
        for i, text in enumerate(texts):
            for word, count in Counter(_words(text)).items():
                if word in self._columns:
                    vectors[i, self._columns[word]] = count * self._rareness[self._columns[word]]
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
        """The nearest; equally near ones in the order of the corpus."""
        scores = queries @ self._vectors.T
        nearest = np.argsort(-scores, axis=1, kind="stable")[:, :topk]
        return np.take_along_axis(scores, nearest, axis=1), nearest


def flat_index(vectors: Float32s) -> Index:
    """An exact index over the vectors: FAISS's where it is installed (the extra `search`), else numpy's."""
    try:
        faiss = import_module("faiss")
    except ImportError:
        return NumpyIndex(vectors)
    index = faiss.IndexFlatIP(vectors.shape[1])
    index.add(np.ascontiguousarray(vectors))
    found: Index = index
    return found


@dataclass(frozen=True, slots=True)
class Retriever:
    """A corpus that can be asked."""

    passages: Sequence[Passage]
    encoder: Encoder
    index: Index

    @staticmethod
    def of(passages: Sequence[Passage], encoder: Encoder, embeddings: Path | None = None) -> Retriever:
        """Encode the corpus, or read its vectors from `embeddings` (.npy), which is written where it is missing.

        Raises:
            UserError: the file holds no vectors, or not those of this corpus and encoder.
        """
        if embeddings is not None and embeddings.is_file():
            vectors = _kept(embeddings, (len(passages), encoder.queries(["width"]).shape[1]))
        else:
            vectors = encoder.passages([passage.contents for passage in passages])
            if embeddings is not None:
                _keep(vectors, embeddings)
        return Retriever(passages, encoder, flat_index(vectors))

    def search(self, queries: Sequence[str], topk: int) -> list[list[Found]]:
        """The `topk` nearest passages of each query, nearest first."""
        scores, numbers = self.index.search(self.encoder.queries(queries), min(topk, len(self.passages)))
        return [
            [Found(self.passages[number], score) for score, number in zip(row, nearest, strict=True)]
            for row, nearest in zip(scores.tolist(), numbers.tolist(), strict=True)
        ]


def _kept(path: Path, shape: tuple[int, int]) -> Float32s:
    try:
        vectors: Float32s = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} holds no vectors ({error}); remove it") from error
    if vectors.shape != shape or vectors.dtype != np.float32:
        found = f"vectors of {vectors.dtype} {list(vectors.shape)}"
        raise UserError(f"{path} has {found}, this corpus and encoder have float32 {list(shape)}; remove it")
    return vectors


def _keep(vectors: Float32s, path: Path) -> None:
    """Write them to another name first: who starts next finds the whole file or none."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
    try:
        with unfinished.open("wb") as file:  # an open file, as np.save gives a name without .npy another one
            np.save(file, vectors)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def load_corpus(path: Path) -> list[Passage]:
    """A JSONL file with `id` and `contents` in each row.

    Raises:
        UserError: it is missing, empty or malformed; the message names file and row.
    """
    if not path.is_file():
        raise UserError(f"corpus: there is no file {path}")
    passages = []
    try:
        with path.open(encoding="utf-8") as file:
            for row, line in enumerate(file):
                passages.append(_passage(line, row, path))
    except UnicodeDecodeError as error:
        raise UserError(f"corpus: {path}, row {len(passages)} or one soon after it: not UTF-8: {error}") from error
    if not passages:
        raise UserError(f"corpus: {path} has no rows")
    return passages


def _passage(line: str, row: int, path: Path) -> Passage:
    try:
        document = json.loads(line)
        if not is_text(document["contents"]):
            raise TypeError("contents is no text")
        return Passage(str(document["id"]), document["contents"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"corpus: {path}, row {row}: give an object with id and contents ({error})") from error


def _words(text: str) -> list[str]:
    return WORD.findall(text.lower())
