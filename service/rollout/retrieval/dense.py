"""Search by vectors: an encoder from a Hugging Face folder, and exact search by products with all vectors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import psutil
import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoModel, AutoTokenizer

from service.config.model_folder import is_model_folder
from service.errors import UserError
from service.files import atomic_file
from service.types import Float32s, Int64s

UNREADABLE = (
    OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, RuntimeError, SafetensorError,
    StrictDataclassError,
)  # fmt: skip
"""The errors of transformers for a broken folder depend on what is broken."""


CHUNK = 1 << 18
"""Vectors whose scores are in memory at once: 1 MiB for each query."""


class Encoder(Protocol):
    """Turns texts into vectors of length 1."""

    def passages(self, texts: Sequence[str]) -> Float32s:
        """[N, d] vectors of passages."""

    def queries(self, texts: Sequence[str]) -> Float32s:
        """[Q, d] vectors of queries."""


class DenseEncoder:
    """An encoder model; the mean of its last hidden states is scaled to length 1.

    Some models, such as E5, need a prefix (`query: `, `passage: `) before the text.
    """

    def __init__(
        self,
        folder: Path,
        device: torch.device,
        query_prefix: str = "",
        passage_prefix: str = "",
        batch_size: int = 64,
        max_length: int = 256,
    ) -> None:
        if not is_model_folder(folder):
            raise UserError(f"encoder: {folder} is no Hugging Face model folder (it has no config.json)")
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
            model = AutoModel.from_pretrained(str(folder), local_files_only=True)
        except UNREADABLE as error:
            first = str(error).strip().partition("\n")[0]
            raise UserError(f"encoder: {folder} holds no encoder that can be read: {first}") from error
        self._model = model.to(device).eval()
        self._device = device
        self._query_prefix, self._passage_prefix = query_prefix, passage_prefix
        self._batch_size, self._max_length = batch_size, max_length

    def passages(self, texts: Sequence[str]) -> Float32s:
        """[n, hidden] vectors."""
        return self._encode([self._passage_prefix + text for text in texts])

    def queries(self, texts: Sequence[str]) -> Float32s:
        """[n, hidden] vectors."""
        return self._encode([self._query_prefix + text for text in texts])

    def _encode(self, texts: Sequence[str]) -> Float32s:
        # Texts of similar length share a batch, so that little is padded.
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        vectors = np.empty((len(texts), self._model.config.hidden_size), dtype=np.float32)
        for start in range(0, len(order), self._batch_size):
            batch = order[start : start + self._batch_size]
            vectors[batch] = self._encode_batch([texts[i] for i in batch])
        return vectors

    @torch.inference_mode()
    def _encode_batch(self, texts: list[str]) -> Float32s:
        tokens = self._tokenizer(
            texts, padding=True, truncation=True, max_length=self._max_length, return_tensors="pt"
        ).to(self._device)
        if not tokens["input_ids"].shape[1]:  # no text has a token: zeros, equally near to every passage
            return np.zeros((len(texts), self._model.config.hidden_size), dtype=np.float32)
        hidden = self._model(**tokens).last_hidden_state.float()
        mask = tokens["attention_mask"].unsqueeze(-1)
        mean = torch.where(mask.bool(), hidden, 0.0).sum(1) / mask.sum(1).clamp(min=1)
        normal: Float32s = torch.nn.functional.normalize(mean, dim=1).cpu().numpy()
        return normal


class DenseIndex:
    """All passages' vectors on one device: half precision on a GPU, else float32 on all threads of torch.

    Raises:
        UserError: the GPU has too little free memory.
    """

    def __init__(self, encoder: Encoder, vectors_Nd: Float32s, device: torch.device) -> None:
        self._encoder = encoder
        if device.type != "cuda":
            self.vectors_Nd = torch.from_numpy(vectors_Nd)
            return
        needed, free = 2 * vectors_Nd.size, torch.cuda.mem_get_info(device)[0]
        if needed > free:
            raise UserError(
                f"the corpus's vectors need {needed / 2**30:.1f} GiB on the GPU, {free / 2**30:.1f} GiB are free; "
                "env.retrieval.gpus: 0 searches on the CPU"
            )
        self.vectors_Nd = half_precision(vectors_Nd, device)

    def search(self, queries: Sequence[str], topk: int) -> tuple[Float32s, Int64s]:
        """As `Index.search`; among equal scores any."""
        vectors_Qd = torch.from_numpy(self._encoder.queries(queries)).to(self.vectors_Nd)
        scores, numbers = nearest(vectors_Qd, self.vectors_Nd, topk)
        return scores.cpu().numpy(), numbers.cpu().numpy()


def half_precision(vectors_Nd: Float32s, device: torch.device) -> torch.Tensor:
    """[N, d] the vectors in half precision on a device; the host converts one chunk at a time."""
    found = torch.empty(vectors_Nd.shape, dtype=torch.float16, device=device)
    for chunk, part in zip(torch.split(found, CHUNK), torch.split(torch.from_numpy(vectors_Nd), CHUNK), strict=True):
        chunk.copy_(part.to(torch.float16))
    return found


def nearest(queries_Qd: torch.Tensor, vectors_Nd: torch.Tensor, topk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[Q, topk] largest inner products, largest first, in float32, and the numbers of their vectors."""
    best = queries_Qd.new_empty((len(queries_Qd), 0), dtype=torch.float32)
    numbers = torch.empty_like(best, dtype=torch.int64)
    for i, chunk in enumerate(torch.split(vectors_Nd, CHUNK)):
        scores = _products(queries_Qd, chunk)
        of_chunk, found = scores.topk(min(topk, len(chunk)))
        best, numbers = torch.cat([best, of_chunk], dim=1), torch.cat([numbers, found + i * CHUNK], dim=1)
        best, kept = best.topk(min(topk, best.shape[1]))
        numbers = numbers.gather(1, kept)
    return best, numbers


def _products(queries_Qd: torch.Tensor, vectors_Nd: torch.Tensor) -> torch.Tensor:
    """[Q, N] inner products in float32, which keeps near scores apart; a product on the CPU has no `out_dtype`."""
    if not vectors_Nd.is_cuda:
        return queries_Qd @ vectors_Nd.T
    return torch.mm(queries_Qd, vectors_Nd.T, out_dtype=torch.float32)


def encoded(texts: Sequence[str], encoder: Encoder, file: Path | None) -> Float32s:
    """[N, d] vectors of passages, in memory or in a file (.npy), which is written if it is missing.

    Raises:
        UserError: the file holds no vectors, or vectors of another corpus or encoder; without a file, the free memory
            cannot hold them.
    """
    shape = len(texts), encoder.queries(["width"]).shape[1]
    if file is None:
        _refuse_too_many(shape, psutil.virtual_memory().available)
        return encoder.passages(texts)
    if not file.is_file():
        with atomic_file(file) as partial:
            vectors = np.lib.format.open_memmap(partial, "w+", np.float32, shape)  # type: ignore[no-untyped-call]
            for begin in range(0, len(texts), CHUNK):
                vectors[begin : begin + CHUNK] = encoder.passages(texts[begin : begin + CHUNK])
            vectors.flush()
    return _load_vectors(file, shape)


def _refuse_too_many(shape: tuple[int, int], memory: int) -> None:
    needed = 4 * math.prod(shape)
    if needed > memory:
        raise UserError(
            f"the corpus's vectors need {needed / 2**30:.1f} GiB of memory, {memory / 2**30:.1f} GiB are free; "
            "give embeddings, a file for them"
        )


def _load_vectors(path: Path, shape: tuple[int, int]) -> Float32s:
    try:
        # Mapped and writable (in memory only), because torch warns of arrays that are not.
        vectors: Float32s = np.load(path, mmap_mode="c", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} holds no vectors ({error}); remove it") from error
    if vectors.shape != shape or vectors.dtype != np.float32:
        found = f"vectors of {vectors.dtype} {list(vectors.shape)}"
        raise UserError(f"{path} has {found}, this corpus and encoder have float32 {list(shape)}; remove it")
    return vectors
