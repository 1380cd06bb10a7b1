"""A retriever as configured: the corpus, and an encoder for it."""

from __future__ import annotations

from examples.data import CORPUS
from service.config.rollout import RetrievalConfig
from service.errors import UserError
from service.rollout.retrieval.index import Encoder, Retriever, WordEncoder, load_corpus


def open_retriever(config: RetrievalConfig, device: str) -> Retriever:
    """Read the corpus, and encode it where no vectors are kept.

    Raises:
        UserError: a file is missing or malformed, or the encoder cannot run there.
    """
    passages = load_corpus(config.corpus or CORPUS)
    encoder = _encoder(config, device, [passage.contents for passage in passages])
    return Retriever.of(passages, encoder, config.embeddings)


def _encoder(config: RetrievalConfig, device: str, texts: list[str]) -> Encoder:
    if config.encoder is None:
        return WordEncoder(texts)
    import torch  # a server that goes by words starts without it

    from service.rollout.retrieval.dense import DenseEncoder

    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # the latter where torch was built without it
        raise UserError(f"the encoder cannot run on {device!r}: {error}; give cpu") from error
    return DenseEncoder(config.encoder, torch.device(device), config.query_prefix, config.passage_prefix)
