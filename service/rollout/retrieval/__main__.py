"""`python -m service.rollout.retrieval --corpus corpus.jsonl [--encoder folder]`: a stand-alone retrieval server."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from aiohttp import web

from service.errors import UserError
from service.rollout.data import CORPUS
from service.rollout.retrieval.index import Encoder, Retriever, WordEncoder, load_corpus
from service.rollout.retrieval.server import application


def main(arguments: list[str] | None = None) -> int:
    """Serve until interrupted."""
    options = _parser().parse_args(arguments)
    try:
        retriever = _retriever(options)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(f"{len(retriever.passages)} passages at http://{options.host}:{options.port}/retrieve", flush=True)
    web.run_app(application(retriever), host=options.host, port=options.port, print=None)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m service.rollout.retrieval", description="a retrieval server")
    parser.add_argument("--corpus", type=Path, default=CORPUS, help="JSONL with id and contents; default: Baton's own")
    parser.add_argument("--encoder", type=Path, help="Hugging Face folder of a dense encoder; default: by words")
    parser.add_argument("--embeddings", type=Path, help="the corpus's vectors (.npy); written where missing")
    parser.add_argument("--query-prefix", default="", help="before each question, such as 'query: ' for E5")
    parser.add_argument("--passage-prefix", default="", help="before each passage, such as 'passage: ' for E5")
    parser.add_argument("--device", default="cpu", help="where the encoder runs")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    return parser


def _retriever(options: argparse.Namespace) -> Retriever:
    passages = load_corpus(options.corpus)
    return Retriever.of(passages, _encoder(options, [passage.contents for passage in passages]), options.embeddings)


def _encoder(options: argparse.Namespace, texts: list[str]) -> Encoder:
    if options.encoder is None:
        return WordEncoder(texts)
    import torch  # a server that goes by words starts without it

    from service.rollout.retrieval.dense import DenseEncoder

    return DenseEncoder(options.encoder, torch.device(options.device), options.query_prefix, options.passage_prefix)


if __name__ == "__main__":
    sys.exit(main())
