"""The version of the installed package, and the repository folders that are installed with it."""

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def bundled_folder(name: str) -> Path:
    """The path of a folder that is at the top of a checkout, or inside the package if that is installed.

    Args:
        name: "hub_cards".

    Raises:
        FileNotFoundError: if the folder is in neither place, so the installation is incomplete.

    Example:
        >>> (bundled_folder("hub_cards") / "heads.md.jinja").is_file()
        True
    """
    package = Path(__file__).parent
    for place in (package / name, package.parent / name):
        if place.is_dir():
            return place
    raise FileNotFoundError(f"The installation of ssd-pipelines lacks its folder {name}: reinstall it.")


def package_version() -> str:
    """The installed version; "0+unknown" for a source tree on the Python path that is not installed."""
    try:
        return version("ssd-pipelines")
    except PackageNotFoundError:
        return "0+unknown"
