"""A retrieval server on BM25 (the extra `search`), for environments such as `search_r1`.

    python -m baton.examples.search_server --corpus corpus.jsonl --port 8000
    curl http://127.0.0.1:8000/retrieve -d '{"query": "river", "topk": 2}'

The server answers as Search-R1's and SkyRL's servers do: a passage is `{"id": ..., "contents": ...}`, or, with
`return_scores`, `{"document": ..., "score": ...}`. A request that the server refuses gets status 400 and the reason.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
from aiohttp import web

from baton import UserError
from baton.examples import data


class Passage(msgspec.Struct, frozen=True):
    """One row of a corpus; other columns are ignored."""

    id: str | int
    contents: str


class Hit(NamedTuple):
    """A passage in a search result."""

    passage: Passage
    score: float


class Question(msgspec.Struct, frozen=True):
    """The body of a request: `query` or `queries`; null means the default."""

    query: str | None = None
    queries: Annotated[list[str], msgspec.Meta(min_length=1, max_length=256)] | None = None
    topk: Annotated[int, msgspec.Meta(ge=1, le=100)] | None = None
    """Number of passages per query; None: 3."""
    return_scores: bool | None = None


class Corpus:
    """The passages of a JSONL file with `id` and `contents` in each row, and an index of their words.

    Raises:
        UserError: bm25s is not installed, or the file is missing, empty or malformed; the message names the row.
    """

    def __init__(self, path: Path) -> None:
        try:
            import bm25s  # imported here, because an environment that queries a server does not need it
        except ImportError as error:
            raise UserError("a search without a server's `url` needs bm25s; install baton-rl[search]") from error
        self._tokenize = bm25s.tokenize
        self.passages = _passages(path)
        self._index = bm25s.BM25()
        self._index.index(self._words([passage.contents for passage in self.passages]), show_progress=False)

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """The `topk` nearest passages of each query, nearest first."""
        most = min(topk, len(self.passages))
        found, scores = self._index.retrieve(self._words(queries), k=most, show_progress=False)
        return [
            [Hit(self.passages[number], score) for number, score in zip(numbers, of, strict=True)]
            for numbers, of in zip(found.tolist(), scores.tolist(), strict=True)
        ]

    def _words(self, texts: Sequence[str]) -> list[list[str]]:
        words: list[list[str]] = self._tokenize(
            list(texts), token_pattern=r"\w+", stopwords=[], return_ids=False, show_progress=False
        )
        return words


def _passages(path: Path) -> list[Passage]:
    if not path.is_file():
        raise UserError(f"corpus: there is no file {path}")
    passages: list[Passage] = []
    decoder = msgspec.json.Decoder(Passage)
    with path.open("rb") as file:
        try:
            for line in file:
                passages.append(decoder.decode(line))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            place = f"corpus: {path}, row {len(passages)}"
            raise UserError(f"{place}: give an object with id and contents ({error})") from error
    if not any(passage.contents.strip() for passage in passages):
        raise UserError(f"corpus: {path} has no rows with words")
    return passages


def application(corpus: Corpus) -> web.Application:
    """The server as an aiohttp application: `POST /retrieve`."""
    thread = ThreadPoolExecutor(1, thread_name_prefix="search")
    decoder = msgspec.json.Decoder(Question)

    async def retrieve(request: web.Request) -> web.Response:
        try:
            question = decoder.decode(await request.read())
            if (question.query is None) == (question.queries is None):
                raise ValueError("give either query or queries")
        except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
            return web.json_response({"error": str(error)}, status=400)
        queries, topk = question.queries or [question.query or ""], question.topk or 3
        found = await asyncio.get_running_loop().run_in_executor(thread, corpus.search, queries, topk)
        scored = question.return_scores is True
        return web.json_response({"result": [[_document(hit, scored) for hit in hits] for hits in found]})

    app = web.Application()
    app.add_routes([web.post("/retrieve", retrieve)])
    return app


def _document(hit: Hit, scored: bool) -> dict[str, object]:
    document: dict[str, object] = {"id": str(hit.passage.id), "contents": hit.passage.contents}
    return {"document": document, "score": hit.score} if scored else document


def main(arguments: list[str] | None = None) -> int:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(
        prog="python -m baton.examples.search_server", description="a retrieval server on BM25"
    )
    parser.add_argument("--corpus", type=Path, default=data.CORPUS, help="JSONL; default: the demonstration's corpus")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args(arguments)
    try:
        corpus = Corpus(options.corpus)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    address = f"http://{options.host}:{options.port}/retrieve"
    print(f"{len(corpus.passages)} passages at {address}", flush=True)
    web.run_app(application(corpus), host=options.host, port=options.port, print=None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
