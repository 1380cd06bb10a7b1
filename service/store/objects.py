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
from service.store_url import store_url_problem

CHUNK_BYTES = 16 << 20
"""Bytes above which an object is uploaded in parts, and minimum bytes of a part (larger objects have larger parts,
because S3 accepts at most 10,000 parts)."""
PARTS_AT_ONCE = 8
ENDPOINTS = ("AWS_ENDPOINT", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3")
"""Environment variables that give the address of a server other than Amazon's."""
ANSWERS = {
    "NoSuchBucket": "there is no such bucket",
    "AccessDenied": "the credentials do not permit it",
    "InvalidAccessKeyId": "the store does not know the access key of the environment",
    "SignatureDoesNotMatch": "the secret key of the environment is wrong",
    "ExpiredToken": "the credentials of the environment have expired",
    "Unable to canonicalize filesystem root": "there is no such folder",
    "169.254.169.254": "the environment has no credentials for it, and this machine has no role",
}
"""What the library's messages contain, and what that means."""


def open_store(url: str, create: bool = False, within: float = 20.0) -> Objects:
    """Open the store at an address; no request is sent yet. `create`: create a local folder that is missing. `within`:
    seconds for which a request that fails is repeated.

    Raises:
        UserError: the address is malformed, or the package for object stores is missing.
    """
    if problem := store_url_problem(url):
        raise UserError(f"run.store: {problem}")
    if find_spec("obstore") is None:
        raise UserError("run.store: the package obstore is not installed: pip install 'baton-rl[store]'")
    try:
        return Objects(url, create, within)
    except StoreFailed as error:
        raise UserError(f"run.store: {error}") from None


class Objects:
    """The objects below an address of an object store. The library obstore reads credentials and endpoint from
    environment variables.

    Every method raises `StoreFailed` if its request fails.
    """

    def __init__(self, url: str, create: bool, within: float) -> None:
        import obstore
        from obstore.store import from_url

        self.url = url.rstrip("/")
        self._obstore: Any = obstore
        client = {"timeout": "120s", "connect_timeout": "10s"}
        if any(os.environ.get(name, "").startswith("http://") for name in ENDPOINTS):  # a server of the local network
            client["allow_http"] = True  # type: ignore[assignment]
        retries = {"max_retries": max(2, round(within / 10)), "retry_timeout": timedelta(seconds=within)}
        with self._named("opening it"):
            remote = {"client_options": client, "retry_config": retries}
            options: dict[str, Any] = {"mkdir": create} if url.startswith("file:") else remote
            self._store = from_url(self.url, **options)

    def put(self, name: str, chunks: Iterable[bytes], size: int) -> None:
        """Write an object of `size` bytes; the object appears either completely or not at all."""
        part = max(CHUNK_BYTES, -(-size // 9_000))
        in_parts = size > part
        with self._named(f"writing {name}"):
            data = iter(chunks) if in_parts else b"".join(chunks)
            options = {"use_multipart": in_parts, "chunk_size": part, "max_concurrency": PARTS_AT_ONCE}
            self._obstore.put(self._store, name, data, **options)

    def create(self, name: str, data: bytes) -> bool:
        """Write an object, unless there is one of that name. Returns True if the object has these bytes now."""
        from obstore.exceptions import AlreadyExistsError

        with self._named(f"writing {name}"):
            try:
                self._obstore.put(self._store, name, data, mode="create", use_multipart=False)
            except AlreadyExistsError:  # possibly from an attempt whose answer was lost
                return b"".join(self.get(name)) == data
        return True

    def get(self, name: str) -> Iterator[bytes]:
        """Yield the bytes of an object in chunks."""
        with self._named(f"reading {name}"):
            for chunk in self._obstore.get(self._store, name).stream(min_chunk_size=CHUNK_BYTES):
                yield bytes(chunk)

    def sizes(self) -> dict[str, int]:
        """For each object in the store, its size in bytes."""
        with self._named("listing it"):
            return {found["path"]: found["size"] for batch in self._obstore.list(self._store) for found in batch}

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
        """Within the block, turn every error of the library into a one-line `StoreFailed`, without the requests, keys
        and signatures that the library adds."""
        from obstore.exceptions import BaseError

        try:
            yield
        except (BaseError, OSError, ValueError) as error:
            first = re.sub(r"//\S*@|\?\S*", "", str(error).partition("\n")[0]).removeprefix("Generic S3 error: ")
            reason = next((means for part, means in ANSWERS.items() if part in str(error)), first[:200])
            raise StoreFailed(f"{self.url}: {doing}: {reason}") from None
