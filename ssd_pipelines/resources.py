"""The installed package itself: its version, and the folders of the repository that are installed with it."""

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def bundled_folder(name: str) -> Path:
    """A folder that is at the top of a checkout, and inside the package when that is installed.

    Args:
        name: "hub_cards".

    Raises:
        FileNotFoundError: if the installation is incomplete.

    Example:
        >>> (bundled_folder("hub_cards") / "heads.md.jinja").is_file()
        True
    """
    package = Path(__file__).parent
    for place in (package / name, package.parent / name):
        if place.is_dir():
            return place
    raise FileNotFoundError(f"The installation of ssd-pipelines lacks its folder {name}: install it again.")


def package_version() -> str:
    """The installed version; "0+unknown" for a source tree that is on the path without an installation."""
    try:
        return version("ssd-pipelines")
    except PackageNotFoundError:
        return "0+unknown"
