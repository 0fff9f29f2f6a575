"""The structure that DESIGN states: imports point down, none of them in a circle, and the tests mirror the package."""

import ast
import graphlib
from pathlib import Path

import ssd_pipelines


PACKAGE = Path(ssd_pipelines.__file__).parent

LAYERS = (
    ("grid", "sampling", "pictures", "resources", "hub"),
    ("cache", "pipeline_output", "scenes"),
    ("verifiers", "heads.layers"),
    ("backbones", "heads.model", "heads"),
    ("heads.loading", "publishing", "input_checks"),
    ("loading",),
    ("pipeline",),
    ("modular", "conversion", "testing"),
    ("training", "evaluation"),
    ("race",),
    ("demo",),
    ("cli",),
)
"""From the ground up; a module may import from its own layer and from those before it."""


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path: Path, known: dict[str, Path]) -> set[str]:
    """Modules of the package that a file imports, at its top or inside a function."""
    tree = ast.parse(path.read_text("utf-8"))
    found = set()
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            # A name that is imported from a package may be a module of it.
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name.removeprefix("ssd_pipelines.") in known else str(node.module) for name in names]
        found |= {name.removeprefix("ssd_pipelines.") for name in names if name.startswith("ssd_pipelines.")}
    return found & set(known)


def layer(module: str) -> int:
    places = [(len(name), place) for place, names in enumerate(LAYERS) for name in names if inside(module, name)]
    assert places, f"{module} has no layer: give it one in LAYERS"
    return max(places)[1]


def inside(module: str, name: str) -> bool:
    return module == name or module.startswith(f"{name}.")


def inner() -> dict[str, Path]:
    """All modules but the package's face and its command, which stand above all."""
    return {name: path for name, path in modules().items() if name not in ("", "__main__")}


def test_every_import_points_down() -> None:
    known = inner()
    upward = [
        f"{module} -> {target}"
        for module, path in known.items()
        for target in imports(path, known)
        if layer(target) > layer(module)
    ]
    assert not upward


def test_no_file_imports_in_a_circle() -> None:
    known = inner()
    graph = {module: imports(path, known) - {module} for module, path in known.items()}
    assert list(graphlib.TopologicalSorter(graph).static_order()), "a circle raises CycleError and names its files"


def test_verifiers_know_neither_backbones_nor_heads_and_models_no_publishing() -> None:
    known = inner()
    for module, path in known.items():
        for target in imports(path, known):
            if inside(module, "verifiers"):
                assert not inside(target, "backbones") and not inside(target, "heads"), f"{module} -> {target}"
            if inside(module, "backbones") or module in ("heads", "heads.model", "heads.layers"):
                assert not inside(target, "publishing"), f"{module} -> {target}"


def test_the_root_is_small_and_no_file_is_long() -> None:
    assert len([name for name in modules() if "." not in name and modules()[name].name != "__init__.py"]) <= 12
    tests = Path(__file__).parent
    lengths = {path: len(path.read_text("utf-8").splitlines()) for path in modules().values()}
    assert {str(path): count for path, count in lengths.items() if count > 400} == {}
    packages = {path.parent.name for path in modules().values() if path.name == "__init__.py"} - {"ssd_pipelines"}
    folders = {path.name for path in tests.iterdir() if path.is_dir() and any(path.glob("test_*.py"))}
    assert folders <= packages, "tests mirror the package"
