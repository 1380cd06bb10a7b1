"""Checks addresses of object stores, as in `run.store` or `baton run --resume`."""

from urllib.parse import urlsplit

SCHEMES = ("s3", "gs", "az", "abfss", "file")


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
