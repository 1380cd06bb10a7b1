"""Finds the version of Baton."""

from importlib.metadata import PackageNotFoundError, version


def installed_version() -> str:
    """The version of the installed package, or `source` if Baton runs from a checkout that is not installed."""
    try:
        return version("baton-rl")
    except PackageNotFoundError:
        return "source"
