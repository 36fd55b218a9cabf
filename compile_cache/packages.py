"""Versions of installed packages."""

from importlib.metadata import PackageNotFoundError, version


def version_of(package: str) -> str:
    """The version in the package's metadata; empty if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
