"""Write the files that let plain Diffusers load a saved pipeline: `save_pretrained(..., with_remote_code_shim=True)`.

Diffusers looks for classes of other libraries in the folder that it loads: the pipeline's class in `pipeline.py`, a
component's class in a file named after its library. Each file written here contains one import from the installed
package. Our own loader never reads them.
"""

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


LIBRARY = "ssd_pipelines"

_TEMPLATE = """# Lets plain Diffusers find a class of the installed package: pip install ssd-pipelines
from {library} import {name}  # noqa: F401
"""


@contextmanager
def without_code(folder: Path) -> Iterator[Path]:
    """Give a view of a saved pipeline's folder without its Python files.

    Diffusers refuses to load a folder that contains Python files, and code that our loader never sees can't run.

    Args:
        folder: the saved pipeline. If it has no Python files, it is returned itself.

    Returns:
        a context manager that gives the folder to load: a temporary one with links to all other files.
    """
    if not any(folder.glob("*.py")) and not any(folder.glob("*/*.py")):
        yield folder
        return
    with tempfile.TemporaryDirectory() as temporary:
        for path in [*folder.glob("*"), *folder.glob("*/*")]:
            target = Path(temporary) / path.relative_to(folder)
            if path.is_file() and path.suffix != ".py":
                target.parent.mkdir(exist_ok=True)
                try:
                    target.symlink_to(path.resolve())
                except OSError:  # Windows lets only some users create links
                    shutil.copyfile(path, target)
        yield Path(temporary)


def write_remote_code_shim(folder: Path) -> list[Path]:
    """Write the files into a saved pipeline's folder, and refer to `pipeline.py` in its `model_index.json`.

    Returns:
        paths of the files, `pipeline.py` first.
    """
    path = folder / "model_index.json"
    index = json.loads(path.read_text("utf-8"))
    name = index["_class_name"] if isinstance(index["_class_name"], str) else index["_class_name"][1]
    wanted = {folder / "pipeline.py": name}
    for component, entry in index.items():
        if isinstance(entry, list) and entry[0] == LIBRARY:
            wanted[folder / component / f"{LIBRARY}.py"] = entry[1]
    for file, class_name in wanted.items():
        file.write_text(_TEMPLATE.format(library=LIBRARY, name=class_name), "utf-8")
    index["_class_name"] = ["pipeline", name]
    path.write_text(json.dumps(index, indent=2) + "\n", "utf-8")
    return list(wanted)
