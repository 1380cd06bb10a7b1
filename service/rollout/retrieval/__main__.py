"""`python -m service.rollout.retrieval --corpus corpus.jsonl [--encoder folder]`: a stand-alone retrieval server."""

from __future__ import annotations

import argparse
import os
import socket
import sys
from pathlib import Path

from service.config.rollout import RetrievalConfig
from service.errors import UserError
from service.rollout.retrieval.retriever import open_retriever
from service.rollout.retrieval.server import BACKLOG, serve


def main(arguments: list[str] | None = None) -> int:
    """Serve until interrupted."""
    options = _parser().parse_args(arguments)
    settings = ("corpus", "encoder", "embeddings", "query_prefix", "passage_prefix", "cpus")
    config = RetrievalConfig.model_validate({name: getattr(options, name) for name in settings})
    try:
        # Bind first, because encoding a corpus may take a day; connections are refused until `listen`.
        with _bound(options.host, options.port) as bound:
            retriever = open_retriever(config, options.device)
            bound.listen(BACKLOG)
            address = f"http://{options.host}:{bound.getsockname()[1]}/retrieve"
            print(f"{len(retriever.passages)} passages at {address}", flush=True)
            serve(retriever, bound, handle_signals=True)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


def _bound(host: str, port: int) -> socket.socket:
    """A socket bound to the address that does not listen yet."""
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except (OSError, OverflowError, UnicodeError) as error:
        bound.close()
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"--host {host} --port {port}: cannot listen there: {reason}") from error
    return bound


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m service.rollout.retrieval", description="a retrieval server")
    parser.add_argument("--corpus", type=Path, help="JSONL with id and contents; default: the demonstration's corpus")
    parser.add_argument("--encoder", type=Path, help="Hugging Face folder of a dense encoder; default: TF-IDF of words")
    parser.add_argument(
        "--embeddings",
        type=Path,
        help="file of the encoder's vectors (.npy), written if missing",
    )
    parser.add_argument("--query-prefix", default="", help="text before each query, such as 'query: ' for E5")
    parser.add_argument("--passage-prefix", default="", help="text before each passage, such as 'passage: ' for E5")
    parser.add_argument("--device", default="cpu", help="device of the encoder and its vectors, such as cuda")
    parser.add_argument("--cpus", type=int, default=os.cpu_count(), help="threads of the encoder and of its search")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0: any free port")
    return parser


if __name__ == "__main__":
    sys.exit(main())
