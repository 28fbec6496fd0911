"""Writes the table of wings and the map of `docs/architecture.md` from the docstrings of packages and modules: `make map`.

A package's line is the first sentence of its `__init__.py`, a module's that of the module.

    python -m tests.architecture_map
"""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architecture.md"
PACKAGES = ("raystride", "ray_jobs", "pipelines", "model", "triton_kernels")
"""From the outside in: each imports only those after it."""


def first_sentence(path: Path) -> str:
    """Returns what a module's docstring begins with, on one line."""
    text = ast.get_docstring(ast.parse(path.read_text())) if path.exists() else ""
    paragraph = " ".join((text or "").split("\n\n")[0].split())
    return re.split(r"(?<=\.) (?=[A-Z`])", paragraph)[0].rstrip(".")


def list_wings() -> list[str]:
    """Returns the wings of `pipelines` from the ground up, as import-linter's contract has them."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    return next(each["layers"][::-1] for each in contracts if each.get("containers") == ["raystride.pipelines"])


def wing_rows() -> Iterator[str]:
    """Yields the rows of the table of wings."""
    yield from ("| wing | one sentence | inside |", "| --- | --- | --- |")
    for wing in list_wings():
        folder = ROOT / "pipelines" / wing
        inside = sorted(f"`{path.parent.name}`" for path in folder.glob("*/__init__.py"))
        yield f"| `{wing}` | {first_sentence(folder / '__init__.py')} | {', '.join(inside)} |"


def map_lines(folder: Path, depth: int = 0) -> Iterator[str]:
    """Yields a line for a package, then for its modules and packages in the order of their names."""
    yield f"{'  ' * depth + folder.name + '/ ':<29}{first_sentence(folder / '__init__.py')}".rstrip()
    for path in sorted(folder.iterdir(), key=lambda each: (each.is_dir(), each.name)):
        if path.suffix == ".py" and path.name != "__init__.py":
            yield f"{'  ' * (depth + 1) + path.name + ' ':<29}{first_sentence(path)}".rstrip()
        elif path.is_dir() and not path.is_symlink() and next(path.glob("*.py"), None):
            yield from map_lines(path, depth + 1)


def page() -> str:
    """Returns the page with its table and map written anew."""
    lines = "\n".join(line for package in PACKAGES for line in map_lines(ROOT / package))
    text = PAGE.read_text()
    for name, content in (("wings", "\n".join(wing_rows())), ("map", f"```text\n{lines}\n```")):
        head, _, rest = text.partition(f"<!-- {name} -->\n")
        text = f"{head}<!-- {name} -->\n{content}\n<!-- end -->{rest.partition('<!-- end -->')[2]}"
    return text


if __name__ == "__main__":
    PAGE.write_text(page())
