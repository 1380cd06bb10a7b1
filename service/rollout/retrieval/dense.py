"""A dense encoder from a Hugging Face folder: the mean of the last hidden states, scaled to length 1."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoModel, AutoTokenizer

from service.config.model_folder import is_model_folder
from service.errors import UserError
from service.types import Float32s

UNREADABLE = (
    OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, RuntimeError, SafetensorError,
    StrictDataclassError,
)  # fmt: skip
"""The errors of transformers for a broken folder depend on what is broken."""


class DenseEncoder:
    """An encoder model; some models, such as E5, need a prefix (`query: `, `passage: `) before the text."""

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
