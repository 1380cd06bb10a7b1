"""Which Baton this is."""

from importlib.metadata import PackageNotFoundError, version


def installed_version() -> str:
    """The installed version, or `source` when run from a checkout that is not installed."""
    try:
        return version("baton-rl")
    except PackageNotFoundError:
        return "source"
