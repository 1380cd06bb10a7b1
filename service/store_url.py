"""Checks addresses of object stores, as in `run.store` or `baton run --resume`."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

SCHEMES = ("s3", "gs", "az", "abfss", "file")


def is_store_url(word: str) -> bool:
    """True if a word is the address of an object store, and not a path or a name."""
    return "://" in word


def in_a_store(path: str | Path) -> str | None:
    """The error message for a command that needs a folder but was given the address of a store, possibly as a path
    (`s3:/a/b`). None if `path` is not such an address."""
    scheme, colon, _ = str(path).partition(":/")
    if not colon or scheme not in SCHEMES:
        return None
    return f"{path}: a run in a store has no folder here; `baton run --resume` restores it"


def store_url_problem(url: str) -> str | None:
    """A text that says what is wrong with a store's address; None if the address is valid. The text does not repeat
    secrets that the address may contain."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        return f"is no address ({error}); give one like s3://bucket/run"
    if "@" in parts.netloc or parts.query or parts.fragment:
        return "has a user or a part after ? or #, which may hold a secret; put credentials into environment variables"
    if parts.scheme not in SCHEMES:
        return f"its scheme {parts.scheme[:20]!r} is none of {', '.join(SCHEMES)}; give an address like s3://bucket/run"
    if not parts.path.strip("/") or bool(parts.netloc) == (parts.scheme == "file"):
        return "needs a bucket and a path of the run's own, such as s3://bucket/run or file:///mnt/store/run"
    return None
