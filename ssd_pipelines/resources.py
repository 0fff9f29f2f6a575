"""Where the files are that travel with the package but have a place of their own in its repository."""

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
