"""The interface to an object store: reads and writes whole objects by name, below the address of one run."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib.util import find_spec
from typing import Any

from service.errors import StoreFailed, UserError
from service.store_url import endpoint_problem, store_url_problem

CHUNK_BYTES = 16 << 20
"""Bytes above which an object is uploaded in parts, and minimum bytes of a part (larger objects have larger parts,
because S3 accepts at most 10,000 parts)."""
MAX_PARTS = 9_000
PARTS_AT_ONCE = 8
TIMEOUTS = {"timeout": "120s", "connect_timeout": "10s"}
"""Time limits of one request to the store; a request carries at most one part of an object."""
RETRIES = {"max_retries": 2, "retry_timeout": timedelta(seconds=60)}
"""How often and how long a single request is retried; in addition, `Uploads` repeats whole uploads."""
CUT_OFF = "Error getting list response body"
"""The library's message if the answer to a listing broke off; the library does not retry such a listing."""
LISTINGS = 3
"""Maximum attempts at a listing whose answer broke off."""
SHOWN = 200
"""Maximum characters of the store's answer that an error message repeats."""

ANSWERS = {
    "NoSuchBucket": "there is no such bucket",
    "ContainerNotFound": "there is no such container",
    "AccessDenied": "the credentials do not permit it",
    "InvalidAccessKeyId": "the store does not know the access key of the environment",
    "SignatureDoesNotMatch": "the secret key of the environment is wrong",
    "ExpiredToken": "the credentials of the environment have expired",
}
ENDPOINTS = ("AWS_ENDPOINT", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3")
"""Environment variables that give the address of a server other than Amazon's."""
NO_FOLDER = "Unable to canonicalize filesystem root"
"""The library's message for a missing local folder."""
METADATA_SERVICE = "169.254.169.254"
"""Address at which cloud libraries ask for the machine's role if the environment has no credentials."""


def open_store(url: str, create: bool = False) -> Objects:
    """Open the store at an address; no request is sent yet. `create`: create a local folder that is missing.

    Raises:
        UserError: the address or its server's address is malformed, or the package for object stores is missing.
    """
    if problem := store_url_problem(url):
        raise UserError(f"run.store: {problem}")
    for name in ENDPOINTS:
        if (endpoint := os.environ.get(name)) and (problem := endpoint_problem(endpoint)):
            raise UserError(f"run.store: {name} {problem}")
    if find_spec("obstore") is None:
        raise UserError("run.store: the package obstore is not installed: pip install 'baton-rl[store]'")
    try:
        return Objects(url, create)
    except StoreFailed as error:
        raise UserError(f"run.store: {error}") from None


class Objects:
    """The objects below an address of an object store. The library obstore reads credentials and endpoint from
    environment variables.

    Every method raises `StoreFailed` if its request fails.
    """

    def __init__(self, url: str, create: bool = False) -> None:
        import obstore
        from obstore.store import from_url

        self.url = url.rstrip("/")
        self._obstore: Any = obstore
        # A server in the local network may use HTTP without TLS; the library requires an explicit option for that.
        is_plain = any(os.environ.get(name, "").startswith("http://") for name in ENDPOINTS)
        client = TIMEOUTS | ({"allow_http": True} if is_plain else {})
        remote = {"client_options": client, "retry_config": RETRIES}
        with self._named("opening it"):
            options: dict[str, Any] = {"mkdir": create} if url.startswith("file:") else remote
            self._store = from_url(self.url, **options)

    def put(self, name: str, chunks: Iterable[bytes], size: int) -> None:
        """Write an object of `size` bytes; the object appears either completely or not at all."""
        part = max(CHUNK_BYTES, -(-size // MAX_PARTS))
        in_parts = size > part
        with self._named(f"writing {name}"):
            data = iter(chunks) if in_parts else b"".join(chunks)
            self._obstore.put(
                self._store, name, data, use_multipart=in_parts, chunk_size=part, max_concurrency=PARTS_AT_ONCE
            )

    def get(self, name: str) -> Iterator[bytes]:
        """Yield the bytes of an object in chunks."""
        with self._named(f"reading {name}"):
            for chunk in self._obstore.get(self._store, name).stream(min_chunk_size=CHUNK_BYTES):
                yield bytes(chunk)

    def sizes(self) -> dict[str, int]:
        """For each object in the store, its size in bytes; if the answer breaks off, the listing is tried again."""
        left = LISTINGS
        while True:
            try:
                with self._named("listing it"):
                    listed = self._obstore.list(self._store)
                    return {found["path"]: found["size"] for batch in listed for found in batch}
            except StoreFailed as failed:
                left -= 1
                if CUT_OFF not in str(failed) or not left:
                    raise

    def delete(self, names: list[str]) -> None:
        """Delete objects; names without an object are ignored."""
        with self._named("deleting"):
            for name in names:
                try:
                    self._obstore.delete(self._store, name)
                except FileNotFoundError:
                    continue

    @contextmanager
    def _named(self, doing: str) -> Iterator[None]:
        """Within the block, turn every error of the library into a one-line `StoreFailed` without the library's dump of
        the request."""
        from obstore.exceptions import BaseError

        try:
            yield
        except (BaseError, OSError, ValueError) as error:
            raise StoreFailed(f"{self.url}: {doing}: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    """The store's answer as a short line, without the requests, keys and signatures that the library adds."""
    text = str(error)
    if code := re.search(r"<Code>(\w{1,60})</Code>", text):
        return ANSWERS.get(code[1], code[1])
    if NO_FOLDER in text:
        return "there is no such folder"
    if METADATA_SERVICE in text:
        return "the environment has no credentials for it, and this machine has no role"
    first = re.sub(r"\?\S*", "", text.partition("\n")[0])
    return first.removeprefix("Generic S3 error: ")[:SHOWN]
