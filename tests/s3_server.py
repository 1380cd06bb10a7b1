"""A server on this machine that speaks S3, for tests of the object store; and one that fails half of the time."""

import logging
import random
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import pytest

BUCKET = "bucket"
KEY, SECRET = "AKIASTORE", "very-secret-key"


@contextmanager
def s3_server() -> Iterator[dict[str, str]]:
    """Yields the environment variables that lead to the server, which has one bucket; skips where it is missing.

    All servers of one process have the same objects, so each test needs a name of its own in the bucket.
    """
    pytest.importorskip("obstore", reason="the package obstore is not installed")
    moto = pytest.importorskip("moto.server", reason="the package moto is not installed")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # else a line for each request
    server.start()
    host, port = server.get_host_and_port()
    address = f"http://{host}:{port}"
    urllib.request.urlopen(urllib.request.Request(f"{address}/{BUCKET}", method="PUT")).close()
    try:
        yield {
            "AWS_ENDPOINT_URL": address,
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
        }
    finally:
        server.stop()


FAULTS = ("503", "slow", "cut request", "cut answer", "stale")
SLOW_SECONDS = 0.3


class Flaky:
    """What goes wrong between the runs and the server, at random."""

    def __init__(self, address: str, share: float, seed: int) -> None:
        self.server, self.share, self.met = urlsplit(address).netloc, share, Counter[str]()
        self.random, self.lock = random.Random(seed), threading.Lock()
        self.listings: dict[str, tuple[int, bytes]] = {}
        """The answer to each listing that was given last."""

    def fault(self, path: str) -> str:
        """What happens to a request; empty: nothing. The first listing that can be stale is."""
        with self.lock:
            kinds = FAULTS if path in self.listings else FAULTS[:-1]
            fault = self.random.choice(kinds) if self.random.random() < self.share else ""
            if self.share and kinds is FAULTS and not self.met["stale"]:
                fault = "stale"
            self.met[fault] += bool(fault)
        return fault

    def answer(self, method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[int, dict[str, str], bytes]:
        """The server's own answer."""
        connection = HTTPConnection(self.server, timeout=60)
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()
        finally:
            connection.close()


@contextmanager
def flaky_s3_server(share: float, seed: int = 1) -> Iterator[tuple[dict[str, str], Flaky]]:
    """As `s3_server`, but a share of the requests meets one of `FAULTS`."""
    with s3_server() as environment:
        flaky = Flaky(environment["AWS_ENDPOINT_URL"], share, seed)

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def forward(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                fault = flaky.fault(self.path)
                if fault == "slow":
                    time.sleep(SLOW_SECONDS)
                if fault == "503":
                    return self.reply(503, {}, b"<Error><Code>SlowDown</Code></Error>")
                if fault == "cut request":
                    self.close_connection = True
                    return
                status, headers, answer = flaky.answer(self.command, self.path, dict(self.headers), body)
                if "list-type" in self.path and status == 200:
                    now = answer
                    answer = flaky.listings.get(self.path, now) if fault == "stale" else now
                    flaky.listings[self.path] = now
                self.reply(status, headers, answer, cut=fault == "cut answer")

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = forward

            def reply(self, status: int, headers: dict[str, str], answer: bytes, cut: bool = False) -> None:
                self.send_response_only(status)
                for name, value in headers.items():
                    if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                        self.send_header(name, value)
                # The answer to HEAD has no body but names the object's size; a stale listing has a size of its own.
                size = headers["Content-Length"] if self.command == "HEAD" else str(len(answer))
                self.send_header("Content-Length", size)
                self.end_headers()
                self.wfile.write(answer[: len(answer) // 2] if cut else answer)
                self.close_connection = self.close_connection or cut

            def log_message(self, *arguments: object) -> None:
                pass

        with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
            server.daemon_threads = True
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            try:
                yield {**environment, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}"}, flaky
            finally:
                server.shutdown()
                thread.join()
