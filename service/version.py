"""The version of Baton."""

from importlib.metadata import PackageNotFoundError, version


def installed_version() -> str:
    """The installed version, or `source` if Baton runs from a checkout without installation."""
    try:
        return version("baton-rl")
    except PackageNotFoundError:
        return "source"
