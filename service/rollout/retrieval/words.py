"""An index of a corpus by its words: for every word, the passages that contain it, with their TF-IDF weights."""

from __future__ import annotations

import math
import re
import sys
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from service.errors import UserError
from service.rollout.retrieval.corpus import sample
from service.types import Float32s, Int64s

WORD = re.compile(r"\w+")
POSTING_BYTES = 40
"""Most bytes at once, while an index is made, for one word of one passage."""
WORD_BYTES = 200
"""Most bytes of one entry in the table of words, apart from the word."""
SEARCH_BYTES = 24
"""Most bytes of a search for each passage: its score, and the copies of scores while words are added up or sorted."""


class WordIndex:
    """Finds passages that share words with the query, rare words counting more; needs no model.

    Scores are inner products of TF-IDF vectors of length 1. `_passages[_starts[w] : _starts[w + 1]]` are the passages
    that contain word `w`, and `_weights` their elements of the vectors.
    """

    def __init__(self, corpus: Sequence[str]) -> None:
        self._columns: dict[str, int] = {}
        columns, passages, counts = array("i"), array("i"), array("f")
        for number, text in enumerate(corpus):
            for word, count in _counted(text).items():
                columns.append(self._columns.setdefault(word, len(self._columns)))
                passages.append(number)
                counts.append(count)
        of_word = np.frombuffer(columns, dtype=np.int32)
        documents = np.bincount(of_word, minlength=len(self._columns))
        self._idf = (np.log((1 + len(corpus)) / (1 + documents)) + 1).astype(np.float32)
        order = np.argsort(of_word, kind="stable")
        self._starts = np.concatenate([[0], np.cumsum(documents)])
        self._passages = np.frombuffer(passages, dtype=np.int32)[order]
        self._weights = np.frombuffer(counts, dtype=np.float32)[order]
        del of_word, columns, passages, counts, order  # the rest needs as much memory again
        self._weights *= np.repeat(self._idf, documents)
        norms = np.sqrt(np.bincount(self._passages, self._weights**2, minlength=len(corpus)))
        self._weights /= np.maximum(norms, 1e-9).astype(np.float32)[self._passages]
        self._size = len(corpus)

    def search(self, queries: Sequence[str], topk: int) -> tuple[Float32s, Int64s]:
        """As `Index.search`; equal scores in the order of the corpus."""
        found = [self._best(query, topk) for query in queries]
        return np.stack([scores for scores, _ in found]), np.stack([numbers for _, numbers in found])

    def _best(self, query: str, topk: int) -> tuple[Float32s, Int64s]:
        """[topk] scores and numbers of the best passages; the scores of all others are let go at once."""
        scores_N = self._scores(_counted(query))
        numbers = largest(scores_N, topk)
        return scores_N[numbers], numbers

    def _scores(self, query: Mapping[str, int]) -> Float32s:
        """[N] inner products of a query's vector and each passage's."""
        scores_N = np.zeros(self._size, dtype=np.float32)
        known = {self._columns[word]: count for word, count in query.items() if word in self._columns}
        weights = {word: count * self._idf[word] for word, count in known.items()}
        norm = math.sqrt(sum(float(weight) ** 2 for weight in weights.values()))
        for word, weight in weights.items():
            of_word = slice(self._starts[word], self._starts[word + 1])
            scores_N[self._passages[of_word]] += self._weights[of_word] * np.float32(weight / norm)
        return scores_N


def largest(scores_N: Float32s, k: int) -> Int64s:
    """[k] positions of the largest scores, largest first, equal ones in their order; linear in N."""
    if k >= len(scores_N):
        return np.argsort(-scores_N, kind="stable")
    least = np.partition(scores_N, -k)[-k]
    above, equal = np.flatnonzero(scores_N > least), np.flatnonzero(scores_N == least)
    above = above[np.argsort(-scores_N[above], kind="stable")]
    return np.concatenate([above, equal[: k - len(above)]])


def _counted(text: str) -> Counter[str]:
    return Counter(WORD.findall(text.lower()))


def check_memory(corpus: Path, memory: int) -> None:
    """Raises `UserError` where a corpus and the index of its words need more than `memory` bytes."""
    needed = needed_memory(corpus)
    if needed > memory:
        raise UserError(
            f"corpus: an index of the words of {corpus} needs about {needed / 2**30:.1f} GiB of memory, "
            f"this machine has {memory / 2**30:.1f} GiB; use a smaller corpus, or an encoder"
        )


def needed_memory(corpus: Path) -> int:
    """Bytes that a corpus, its index and a search need at once, estimated from a sample of its rows.

    The number of different words grows as a power of the text's length (Heaps' law); the sample gives the power.
    """
    passages = postings = letters = read = 0
    words: set[str] = set()
    seen = [(0, 0)]
    """(bytes, different words) after each row."""
    for size, passage in sample(corpus):
        counted = _counted(passage.contents)
        new = counted.keys() - words
        read += size
        passages += SEARCH_BYTES + sys.getsizeof(passage) + sys.getsizeof(passage.id) + sys.getsizeof(passage.contents)
        postings += len(counted)
        letters += sum(map(sys.getsizeof, new))
        words |= new
        seen.append((read, len(words)))
    if not words:
        return passages
    more = corpus.stat().st_size / read
    read_before, words_before = seen[len(seen) // 2]
    grows = words_before and read > read_before  # else the sample is too small to say
    power = math.log(len(words) / words_before, read / read_before) if grows else 1.0
    of_words = (letters + WORD_BYTES * len(words)) * more ** min(power, 1.0)
    return int((passages + POSTING_BYTES * postings) * more + of_words)
