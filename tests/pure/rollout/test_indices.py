"""Indices of a corpus: what they find, what memory they need, and the encoder of the dense one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import BertConfig, BertModel

from service.config.rollout import RetrievalConfig
from service.errors import UserError
from service.rollout.chat.tokenizer import make_tokenizer
from service.rollout.retrieval import dense
from service.rollout.retrieval.dense import DenseEncoder, DenseIndex, encoded, half_precision, nearest
from service.rollout.retrieval.retriever import Retriever, check_retriever, open_retriever
from service.rollout.retrieval.words import SEARCH_BYTES, WORD, WordIndex, largest, needed_memory
from service.types import Float32s
from tests.pure.rollout.test_retrieval import TEXTS


class Letters:
    """An encoder that counts letters."""

    def passages(self, texts: Sequence[str]) -> Float32s:
        counts = np.array([[text.count(chr(ord("a") + i)) for i in range(26)] for text in texts], dtype=np.float32)
        return counts / np.maximum(np.linalg.norm(counts, axis=1, keepdims=True), 1)

    queries = passages


def everything(texts: Sequence[str], query: str) -> list[float]:
    """The score of each text, from whole vectors in double precision."""
    documents = Counter(word for text in texts for word in set(WORD.findall(text)))
    idf = {word: np.log((1 + len(texts)) / (1 + n)) + 1 for word, n in documents.items()}

    def vector(text: str) -> Any:
        counts = Counter(WORD.findall(text))
        found = np.array([counts[word] * idf[word] for word in idf])
        return found / max(float(np.linalg.norm(found)), 1e-9)

    return [float(vector(query) @ vector(text)) for text in texts]


def test_an_index_of_words_finds_what_comparing_with_everything_finds() -> None:
    rng = np.random.default_rng(0)
    words = [f"w{i}" for i in range(60)]
    texts = [" ".join(rng.choice(words, rng.integers(0, 20))) for _ in range(300)]
    index = WordIndex(texts)
    for topk in (1, 7, 300):
        queries = [" ".join(rng.choice([*words, "unknown"], rng.integers(0, 6))) for _ in range(20)]
        scores, numbers = index.search(queries, topk)
        for query, row, found in zip(queries, scores, numbers, strict=True):
            wanted = np.array(everything(texts, query))
            np.testing.assert_allclose(row, np.sort(wanted)[::-1][:topk], atol=1e-6)
            np.testing.assert_allclose(wanted[found], row, atol=1e-6)
            assert len(set(found.tolist())) == topk


def test_the_largest_scores_are_those_of_a_full_stable_sort() -> None:
    rng = np.random.default_rng(1)
    for _ in range(200):
        scores = rng.integers(0, 5, rng.integers(1, 40)).astype(np.float32)
        topk = int(rng.integers(1, 50))
        assert largest(scores, topk).tolist() == np.argsort(-scores, kind="stable")[:topk].tolist()


def test_the_nearest_vectors_are_those_of_a_full_sort_however_they_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    vectors, queries = torch.randn(500, 16), torch.randn(7, 16)
    wanted = (queries @ vectors.T).sort(dim=1, descending=True)
    for chunk in (dense.CHUNK, 1, 3, 250, 499):
        monkeypatch.setattr(dense, "CHUNK", chunk)
        for topk in (1, 5, 500):
            scores, numbers = nearest(queries, vectors, topk)
            torch.testing.assert_close(scores, wanted.values[:, :topk])
            assert numbers.tolist() == wanted.indices[:, :topk].tolist()


def test_vectors_are_in_half_precision_on_a_gpu_and_scores_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "CHUNK", 300)
    vectors = np.random.default_rng(0).standard_normal((500, 16)).astype(np.float32)
    assert half_precision(vectors, torch.device("cpu")).numpy().tolist() == vectors.astype(np.float16).tolist()
    with FakeTensorMode():
        on = torch.empty(500, 16, dtype=torch.float16, device="cuda")
        scores, numbers = nearest(torch.empty(7, 16).to(on), on, 5)
    assert (scores.dtype, scores.device.type, list(scores.shape)) == (torch.float32, "cuda", [7, 5])
    assert (numbers.dtype, list(numbers.shape)) == (torch.int64, [7, 5])


def test_an_index_holds_half_precision_on_a_gpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = np.ones((4, 4), np.float32)
    assert DenseIndex(Letters(), vectors, torch.device("cpu")).vectors_Nd.dtype == torch.float32
    sent: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2 * vectors.size, 1000))
    monkeypatch.setattr(dense, "half_precision", lambda vectors, device: sent.append(device))
    DenseIndex(Letters(), vectors, torch.device("cuda"))
    assert sent == [torch.device("cuda")]


def test_vectors_that_do_not_fit_a_gpu_are_refused_before_they_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (31, 1000))
    with pytest.raises(UserError, match=r"need .* GiB on the GPU, .* GiB are free; env\.retrieval\.gpus: 0"):
        DenseIndex(Letters(), np.ones((4, 4), np.float32), torch.device("cuda"))


def made_encoder(folder: Path) -> Path:
    torch.manual_seed(0)
    make_tokenizer(folder, sorted({word for text in TEXTS for word in text.split()}))
    tiny = BertConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    BertModel(tiny).save_pretrained(folder)
    return folder


def rows(path: Path, texts: Sequence[str]) -> Path:
    path.write_text("".join(json.dumps({"id": str(i), "contents": text}) + "\n" for i, text in enumerate(texts)))
    return path


def test_a_dense_search_on_the_cpu_has_as_many_threads_as_the_configuration_says(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    config = RetrievalConfig(
        corpus=rows(tmp_path / "corpus.jsonl", TEXTS), encoder=made_encoder(tmp_path), cpus=before + 1
    )
    try:
        found = open_retriever(config, "cpu").search([TEXTS[1]], 2)[0]
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)
    assert found[0].passage.contents == TEXTS[1] and found[0].score == pytest.approx(1, abs=1e-5)


PEAK = """
import sys
from pathlib import Path
from service.rollout.retrieval.retriever import Retriever

def memory(name):
    status = Path("/proc/self/status").read_text().split()
    return 1024 * int(status[status.index(name) + 1])

Retriever.by_words(Path(sys.argv[1])).search(["w"], 1)
before = memory("VmRSS:")
Retriever.by_words(Path(sys.argv[2]))
print(memory("VmHWM:") - before)
"""


def natural(rng: np.random.Generator, n: int) -> list[str]:
    """Texts whose words are as frequent as those of a language."""
    return [" ".join(f"w{i}" for i in rng.zipf(1.3, 90) % 10**6) for _ in range(n)]


CORPORA: dict[str, Callable[[np.random.Generator], list[str]]] = {
    "natural": lambda rng: natural(rng, 15_000),
    "every word once": lambda rng: [" ".join(f"{i * 60 + j}" for j in range(60)) for i in range(15_000)],
    "letters": lambda rng: [" ".join(map(chr, range(0x4E00, 0x4E00 + 400))) for _ in range(4_000)],
    "one wide letter": lambda rng: [f"\N{GRINNING FACE} {text}" for text in natural(rng, 10_000)],
}


@pytest.mark.parametrize("name", CORPORA)
def test_an_index_of_words_needs_at_most_the_memory_that_is_estimated_from_a_sample(tmp_path: Path, name: str) -> None:
    corpus = rows(tmp_path / "corpus.jsonl", CORPORA[name](np.random.default_rng(0)))
    small = rows(tmp_path / "small.jsonl", TEXTS)
    command = [sys.executable, "-c", PEAK, str(small), str(corpus)]
    peak = int(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
    assert peak < needed_memory(corpus) < 4 * peak
    assert peak < 100 * corpus.stat().st_size


@pytest.mark.parametrize("topk", [1, 100])
def test_a_batch_of_questions_needs_no_more_memory_than_one_and_finds_the_same(topk: int) -> None:
    texts = ["salt"] * 50_000 + ["salt marn"] * 50_000
    index, queries = WordIndex(texts), ["salt", "marn", "salt marn", "nothing"] * 16
    alone = [index.search([query], topk) for query in queries]
    tracemalloc.start()
    try:
        scores, numbers = index.search(queries, topk)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < SEARCH_BYTES * len(texts)
    assert np.array_equal(scores, np.concatenate([one for one, _ in alone]))
    assert np.array_equal(numbers, np.concatenate([one for _, one in alone]))


@pytest.mark.parametrize("texts", [["marn"], ["?!"], ["", "marn"]])
def test_the_smallest_corpora_are_indexed_too(tmp_path: Path, texts: list[str]) -> None:
    corpus = rows(tmp_path / "corpus.jsonl", texts)
    assert 0 < needed_memory(corpus) < 10_000
    (found,) = Retriever.by_words(corpus).search(["marn"], 1)
    assert found[0].passage.contents == texts[-1] or found[0].score == 0


def test_a_corpus_whose_words_need_more_memory_than_there_is_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = rows(tmp_path / "corpus.jsonl", TEXTS * 100)
    config = RetrievalConfig(corpus=corpus)
    check_retriever(config)
    short = psutil.virtual_memory()._replace(total=1000, available=1000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: short)
    for refused in (lambda: check_retriever(config), lambda: Retriever.by_words(corpus)):
        with pytest.raises(UserError, match=r"corpus: .*corpus\.jsonl needs about .* GiB of memory, this machine has"):
            refused()


def test_vectors_without_an_encoder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="embeddings: only an encoder makes vectors"):
        check_retriever(RetrievalConfig(embeddings=tmp_path / "vectors.npy"))


def test_vectors_are_written_once_and_read_afterwards(tmp_path: Path) -> None:
    embeddings = tmp_path / "vectors.npy"
    first = encoded(TEXTS, Letters(), embeddings)
    written = embeddings.stat().st_mtime_ns
    assert encoded(TEXTS, Letters(), embeddings).tolist() == first.tolist()
    assert embeddings.stat().st_mtime_ns == written
    assert os.listdir(tmp_path) == ["vectors.npy"]


def test_vectors_are_encoded_into_their_file_chunk_by_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = psutil.virtual_memory()._replace(available=100)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: short)
    monkeypatch.setattr(dense, "CHUNK", 2)
    asked: list[int] = []

    class Counted(Letters):
        def passages(self, texts: Sequence[str]) -> Float32s:
            asked.append(len(texts))
            return super().passages(texts)

    vectors = encoded(TEXTS, Counted(), tmp_path / "vectors.npy")
    assert asked == [2, 1] and vectors.tolist() == Letters().passages(TEXTS).tolist()
    with pytest.raises(UserError, match=r"vectors need .* GiB of memory, .* GiB are free; give embeddings"):
        encoded(TEXTS, Counted(), None)


def test_vectors_are_kept_under_the_configured_name(tmp_path: Path) -> None:
    encoded(["salt"], Letters(), tmp_path / "vectors")
    assert os.listdir(tmp_path) == ["vectors"]


@pytest.mark.parametrize(
    ("write", "told"),
    [
        (lambda path: np.save(path, np.zeros((2, 3), np.float32)), r"float32 \[2, 3\], .* float32 \[3, \d+\]"),
        (lambda path: np.save(path, np.zeros((3, 2), np.float32)), r"float32 \[3, 2\], .* float32 \[3, \d+\]"),
        (lambda path: np.save(path, np.array([{}])), "no vectors"),
        (lambda path: path.write_bytes(b"\x93NUMPY\x01\0\x76\0{'descr"), "no vectors"),
    ],
)
def test_kept_vectors_that_do_not_fit_corpus_and_encoder_are_refused(
    tmp_path: Path, write: Callable[[Path], Any], told: str
) -> None:
    write(tmp_path / "vectors.npy")
    with pytest.raises(UserError, match=f"vectors.npy .*{told}.*remove it"):
        encoded(TEXTS, Letters(), tmp_path / "vectors.npy")


def test_a_dense_encoder_averages_over_real_tokens_only(tmp_path: Path) -> None:
    encoder = DenseEncoder(made_encoder(tmp_path), torch.device("cpu"), batch_size=2)
    vectors = encoder.passages([*TEXTS, "olt"])
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-5)
    # Padding beside a longer text must not change a shorter one, nor must the order.
    np.testing.assert_allclose(encoder.queries(["olt"])[0], vectors[3], atol=1e-5)
    np.testing.assert_allclose(encoder.passages([TEXTS[2]])[0], vectors[2], atol=1e-5)
    # A question may have no token at all, alone or beside others.
    assert not encoder.queries([""]).any()
    assert not encoder.queries(["olt", ""])[1].any()


def test_a_folder_without_an_encoder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no config\.json"):
        DenseEncoder(tmp_path, torch.device("cpu"))
    for text in ("{", "{}", '{"model_type": "bert", "hidden_size": "wide"}'):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(UserError, match=r"^encoder: .* holds no encoder that can be read: .+$"):
            DenseEncoder(tmp_path, torch.device("cpu"))
