"""Lines that a user of a peer writes: its script, and what of model and data that uses, without what only measures.

Blank lines, comments and docstrings do not count, nor do `protocol` and lines that name the progress.

    user_lines(Path("benchmarks/peers/accelerate_loop.py"))   # 180 or so
"""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MEASURING = ("protocol", "progress", "Progress", "Reporting", "read_job")


def code_lines(source: str) -> set[int]:
    """Numbers of the lines that hold code."""
    tree = ast.parse(source)
    docstrings: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = enumerate(source.splitlines(), start=1)
    return {number for number, line in lines if line.strip() and not line.strip().startswith("#")} - docstrings


def user_lines(script: Path) -> int:
    """Lines of a script and of what it imports from the other peers, each once."""
    tree = ast.parse(script.read_text())
    counted = len(_written(script, tree.body))
    wanted = _imported(tree)
    seen: dict[Path, set[int]] = {}
    done: set[tuple[Path, str]] = set()
    while wanted:
        file, name = wanted.pop()
        if (file, name) in done:
            continue
        done.add((file, name))
        module = ast.parse(file.read_text())
        for node in _definitions(module, name):
            seen.setdefault(file, set()).update(_written(file, [node]))
            used = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
            others = {other for _, other in _own(module) if other in used}
            wanted |= {(file, other) for other in others}
            wanted |= {(place, other) for place, other in _imported(module) if other in used}
    return counted + sum(map(len, seen.values()))


def _written(file: Path, nodes: list[ast.stmt]) -> set[int]:
    """Code lines of some statements, without those that only measure."""
    source = file.read_text()
    lines, code = source.splitlines(), code_lines(source)
    found: set[int] = set()
    for node in nodes:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name in MEASURING:
            continue
        first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", []))])
        found |= set(range(first, (node.end_lineno or node.lineno) + 1)) & code
    return {number for number in found if not any(word in lines[number - 1] for word in MEASURING)}


def _own(module: ast.Module) -> Iterator[tuple[ast.stmt, str]]:
    """Top-level statements by each name that they define."""
    for node in module.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield node, node.name
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                yield from ((node, each.id) for each in ast.walk(target) if isinstance(each, ast.Name))


def _definitions(module: ast.Module, name: str) -> list[ast.stmt]:
    return [node for node, defined in _own(module) if defined == name]


def _imported(module: ast.Module) -> set[tuple[Path, str]]:
    """Files and names that a module imports from the peers, but for the protocol."""
    found: set[tuple[Path, str]] = set()
    for node in ast.walk(module):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("benchmarks.peers."):
            file = ROOT / f"{(node.module or '').replace('.', '/')}.py"
            found |= {(file, alias.name) for alias in node.names if file.stem != "protocol"}
    return found
