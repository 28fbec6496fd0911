"""Writes the map of `docs/architecture.md` from the docstrings of packages and modules: `make map`.

A package's line is the first sentence of its `__init__.py`, a module's that of the module.

    python -m tests.architecture_map
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architecture.md"
PACKAGES = ("raystride", "ray_jobs", "pipelines", "model", "triton_kernels")
"""From the outside in: each imports only those after it."""
MAP = re.compile(r"(<!-- map -->\n```text\n).*?(```\n<!-- end -->)", re.DOTALL)


def first_sentence(path: Path) -> str:
    """Returns what a module's docstring begins with, on one line."""
    text = ast.get_docstring(ast.parse(path.read_text())) if path.exists() else ""
    paragraph = " ".join((text or "").split("\n\n")[0].split())
    return re.split(r"(?<=\.) ", paragraph)[0].rstrip(".")


def map_lines(folder: Path, depth: int = 0) -> Iterator[str]:
    """Yields a line for a package, then for its modules and packages in the order of their names."""
    yield f"{'  ' * depth + folder.name + '/':<29}{first_sentence(folder / '__init__.py')}".rstrip()
    for path in sorted(folder.iterdir(), key=lambda each: (each.is_dir(), each.name)):
        if path.suffix == ".py" and path.name != "__init__.py":
            yield f"{'  ' * (depth + 1) + path.name:<29}{first_sentence(path)}".rstrip()
        elif path.is_dir() and not path.is_symlink() and next(path.glob("*.py"), None):
            yield from map_lines(path, depth + 1)


def main() -> None:
    """Replaces the map of the page."""
    lines = "\n".join(line for package in PACKAGES for line in map_lines(ROOT / package))
    PAGE.write_text(MAP.sub(lambda found: f"{found[1]}{lines}\n{found[2]}", PAGE.read_text()))


if __name__ == "__main__":
    main()
