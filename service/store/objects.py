"""The objects of one run in an object store, by their names below the run's address, and the checkpoints among them."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO, Literal, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from service.errors import StoreFailed, UserError
from service.files import write_atomic
from service.run.folder import STORE_MARK
from service.store_url import store_url_problem

PART_BYTES = 32 << 20
"""Bytes of the parts in which larger objects are uploaded; S3 accepts at most 10,000 parts of an object."""


class Objects:
    """The objects below an address of an object store. The library obstore reads credentials and endpoint from
    environment variables, and repeats requests that fail.

    Every method raises `StoreFailed` if its request fails.
    """

    def __init__(self, url: str, within: float = 20.0) -> None:
        """Open the store; no request is sent yet. `within`: seconds for which a request that fails is repeated.

        Raises:
            UserError: the address is malformed, or the package for object stores is missing.
        """
        if problem := store_url_problem(url):
            raise UserError(f"run.store: {problem}")
        if find_spec("obstore") is None:
            raise UserError("run.store: the package obstore is not installed: pip install 'baton-rl[store]'")
        import obstore
        from obstore.store import from_url

        self.url = url.rstrip("/")
        self._obstore: Any = obstore
        options: dict[str, Any] = {"mkdir": True}
        if not url.startswith("file:"):
            retries = {"max_retries": max(2, round(within / 10)), "retry_timeout": timedelta(seconds=within)}
            client = {"timeout": "120s", "connect_timeout": "10s", "allow_http": True}
            options = {"client_options": client, "retry_config": retries}
        with self._named("opening it"):
            self._store = from_url(self.url, **options)

    def put(self, name: str, file: BinaryIO) -> int:
        """Write an object, which appears either completely or not at all. Returns its size in bytes."""
        with self._named(f"writing {name}"):
            self._obstore.put(self._store, name, file, chunk_size=PART_BYTES, max_concurrency=8)
        return file.tell()

    def create(self, name: str, data: bytes) -> bool:
        """Write an object, unless there is one of that name. Returns True if the object has these bytes now."""
        from obstore.exceptions import AlreadyExistsError

        with self._named(f"writing {name}"):
            try:
                self._obstore.put(self._store, name, data, mode="create", use_multipart=False)
            except AlreadyExistsError:  # perhaps made by an attempt whose answer was lost
                return b"".join(self.get(name)) == data
        return True

    def get(self, name: str) -> Iterator[bytes]:
        """Yield the bytes of an object in chunks."""
        with self._named(f"reading {name}"):
            for chunk in self._obstore.get(self._store, name).stream(min_chunk_size=PART_BYTES):
                yield bytes(chunk)

    def names(self) -> list[str]:
        """The names of all objects in the store."""
        with self._named("listing it"):
            return [found["path"] for batch in self._obstore.list(self._store) for found in batch]

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects one after the other; names without an object are ignored."""
        with self._named("deleting"):
            for name in names:
                with suppress(FileNotFoundError):
                    self._obstore.delete(self._store, name)

    @contextmanager
    def _named(self, doing: str) -> Iterator[None]:
        """Within the block, turn every error of the library into a one-line `StoreFailed`, without the requests, keys
        and signatures that the library adds."""
        from obstore.exceptions import BaseError

        try:
            yield
        except (BaseError, OSError, ValueError) as error:
            reason = re.sub(r"//\S*@|\?\S*", "", str(error).partition("\n")[0])[:200]
            if code := re.search(r"<Code>(\w+)</Code>", str(error)):
                reason = code[1]
            elif "//169.254.169.254/" in reason:  # the address that gives the credentials of a machine's role
                reason = "the environment has no credentials for it, and this machine has no role"
            raise StoreFailed(f"{self.url}: {doing}: {reason}") from None


class StoredManifest(BaseModel):
    """The manifest of a checkpoint in the store, written once all files that the run needs to continue are there."""

    model_config = ConfigDict(extra="forbid")

    format: Literal[1] = 1
    run: str
    """The id of the run; the run's folder has it, too."""
    upload: str
    """The id of the upload; processes that upload the same step write different objects."""

    @classmethod
    def read(cls, objects: Objects, step: int) -> Self:
        """Read the manifest of a step; raises UserError if it is damaged, or of another version of Baton."""
        name = manifest_name(step)
        try:
            return cls.model_validate_json(b"".join(objects.get(name)))
        except ValidationError as error:
            raise UserError(f"{objects.url}: {name} is damaged ({error.errors()[0]['msg']}); delete it there") from None


def manifest_name(step: int) -> str:
    """The name of the manifest of a step's checkpoint."""
    return f"step_{step}/manifest.json"


def stored_steps(names: Iterable[str]) -> list[int]:
    """The steps of all checkpoints that have a manifest in the store, newest first. `names`: the store's objects."""
    found = (re.fullmatch(r"step_([0-9]{1,18})/manifest\.json", name) for name in names)
    return sorted((int(match[1]) for match in found if match), reverse=True)


def run_id(folder: Path, run: str | None = None) -> str:
    """The id of the run in a folder. A folder without an id gets the id `run`, or a new id if `run` is None."""
    file = folder / STORE_MARK
    if run is not None or not file.exists():
        write_atomic(file, json.dumps({"run": run or uuid.uuid4().hex}) + "\n")
    return str(json.loads(file.read_bytes())["run"])
