"""A server on this machine that speaks S3, for tests of the object store."""

from __future__ import annotations

import logging
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

BUCKET = "bucket"
KEY, SECRET = "AKIASTORE", "very-secret-key"


@contextmanager
def s3_server() -> Iterator[dict[str, str]]:
    """Yields the environment variables that lead to the server, which has one bucket; skips where it is missing."""
    pytest.importorskip("obstore", reason="the package obstore is not installed")
    moto = pytest.importorskip("moto.server", reason="the package moto is not installed")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # else a line for each request
    server.start()
    host, port = server.get_host_and_port()
    address = f"http://{host}:{port}"
    urllib.request.urlopen(urllib.request.Request(f"{address}/{BUCKET}", method="PUT")).close()
    yield {
        "AWS_ENDPOINT_URL": address,
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
    }
    server.stop()
