"""A hash of code of one's own that shapes data: a function with all that it reaches in its project, by its source text.

A function reaches the names that it mentions: other functions, classes and constants of its module, and those that it
imports from modules below the same root. Installed packages and Raystride itself are left out, as is all that nothing
mentions: editing the rest of a file prepares nothing anew.

    hash_code([("my_project.cleaning", "clean")])             # 16 hexadecimal digits; "" if no source text is found
"""

import ast
import hashlib
import json
import sys
from collections.abc import Iterable, Iterator
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from raystride.pipelines.plugins import SCRIPT

Name = tuple[str, str]
"""A module and a name in it; "*" for all of it."""
OURS = "raystride"
MODELS = ("build_model",)
"""Methods of a task that shape no data: neither their text nor what they mention counts."""
_INSTALLED = {"site-packages", "dist-packages"}


def name_of(code: object) -> Name:
    """The module of a function or class, and the name at its top level that holds it."""
    while hasattr(code, "func"):  # functools.partial
        code = code.func
    made: Any = code if hasattr(code, "__qualname__") else type(code)
    module = made.__module__
    if module == SCRIPT:  # it may have travelled to a process whose script is another one
        some = [made, *vars(made).values()] if isinstance(made, type) else [made]
        files = (each.__code__.co_filename for each in some if hasattr(each, "__code__"))
        module = f"{SCRIPT}:{next(files, '')}"
    return module, made.__qualname__.partition(".")[0]


def hash_code(names: Iterable[Name]) -> str:
    """The hash of these functions and classes with all that they reach; "" if none of them has source text of its own."""
    found: set[tuple[str, str]] = set()
    seen: set[Name] = set()
    for start in names:
        root, waiting = _root(start[0]), [start]
        while waiting:
            name = waiting.pop()
            if name in seen or not _belongs(name[0], root):
                continue
            seen.add(name)
            for text, more in _reached(*name):
                found.add((_public(name[0]), text))
                waiting += more
    return hashlib.sha256(json.dumps(sorted(found)).encode()).hexdigest()[:16] if found else ""


def _reached(module: str, name: str) -> Iterator[tuple[str, list[Name]]]:
    """The statements of a module that make a name, each as its text and the names that it mentions."""
    file = _file(module)
    source = _source(module)
    if source is None:
        return
    lines = source.splitlines()
    package = module if file and file.name == "__init__.py" else module.rpartition(".")[0]
    package = "" if module.startswith(f"{SCRIPT}:") else package
    statements = _statements(source)
    imported: dict[str, Name] = {}
    made: set[str] = set()
    for statement in statements:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            imported |= _imports(statement, package)
        else:
            made |= _made(statement)
    if name in imported and name not in made:
        yield "", [imported[name]]
        return
    for statement in statements:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            if name == "*":
                yield "", list(_imports(statement, package).values())
            continue
        if name != "*" and name not in (_made(statement) | _changed(statement)):
            continue
        left_out = _left_out(statement)
        text = "\n".join(
            line
            for number, line in enumerate(lines[statement.lineno - 1 : statement.end_lineno], statement.lineno)
            if number not in left_out
        )
        yield text, list(_mentioned(statement, module, package, imported, made))


def _mentioned(statement: ast.stmt, module: str, package: str, imported: dict[str, Name], made: set[str]) -> Iterator[Name]:
    """The names of modules that a statement mentions, those that it imports itself among them."""
    imported, nodes = dict(imported), list(_walk(statement))
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            imported |= _imports(node, package)
    if "*" in imported:
        yield imported["*"]
    owners = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    for node in nodes:
        first, attributes = _chain(node)
        if not isinstance(first, ast.Name) or id(node) in owners:
            continue
        if first.id in made:
            yield module, first.id
        elif first.id in imported:
            there, name = imported[first.id]
            # helpers.clean: one name of a module, which need not be read as a whole.
            while name == "*" and attributes:
                name = attributes.pop()
                if _file(f"{there}.{name}"):
                    there, name = f"{there}.{name}", "*"
            yield there, name


def _chain(node: ast.AST) -> tuple[ast.AST, list[str]]:
    """What a chain of attributes begins with, and their names, the last one first."""
    attributes = []
    while isinstance(node, ast.Attribute):
        attributes.append(node.attr)
        node = node.value
    return node, attributes


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """A node and all below it, but for models."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not (isinstance(node, ast.ClassDef) and isinstance(child, ast.FunctionDef) and child.name in MODELS):
            yield from _walk(child)


def _left_out(statement: ast.stmt) -> set[int]:
    """The numbers of the lines of a class that make models."""
    some = statement.body if isinstance(statement, ast.ClassDef) else []
    models = [each for each in some if isinstance(each, ast.FunctionDef) and each.name in MODELS]
    return {number for each in models for number in range(each.lineno, (each.end_lineno or each.lineno) + 1)}


def _imports(statement: ast.Import | ast.ImportFrom, package: str) -> dict[str, Name]:
    """What an import makes known, by the name that it has here."""
    if isinstance(statement, ast.Import):
        return {
            each.asname or each.name.partition(".")[0]: (each.name if each.asname else each.name.partition(".")[0], "*")
            for each in statement.names
        }
    base = statement.module or ""
    if statement.level:
        parts = package.split(".")
        base = ".".join([*parts[: len(parts) - statement.level + 1], *([base] if base else [])])
    return {
        each.asname or each.name: (f"{base}.{each.name}", "*") if _file(f"{base}.{each.name}") else (base, each.name)
        for each in statement.names
    }


def _made(statement: ast.stmt) -> set[str]:
    """The names that a statement binds."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {statement.name}
    return {
        node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del)
    }


def _changed(statement: ast.stmt) -> set[str]:
    """The names of what a statement may change without binding it: `TABLE["a"] = 1`, `TABLE.update(...)`."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return set()
    owners = (node.value for node in ast.walk(statement) if isinstance(node, ast.Attribute | ast.Subscript))
    return {owner.id for owner in owners if isinstance(owner, ast.Name)}


@lru_cache(maxsize=256)
def _statements(source: str) -> tuple[ast.stmt, ...]:
    """The statements at a module's top level, those below a condition or in a `try` among them."""
    found: list[ast.stmt] = []
    waiting: list[ast.stmt] = list(reversed(ast.parse(source).body))
    while waiting:
        statement = waiting.pop()
        if isinstance(statement, ast.If | ast.Try):
            if isinstance(statement, ast.If) and "__name__" in {
                node.id for node in ast.walk(statement.test) if isinstance(node, ast.Name)
            }:
                continue
            inner = [*statement.body, *statement.orelse, *getattr(statement, "finalbody", [])]
            waiting += reversed(inner + [each for handler in getattr(statement, "handlers", []) for each in handler.body])
        else:
            found.append(statement)
    return tuple(found)


def _source(module: str) -> str | None:
    """A module's text; None if it has none, as what is compiled or typed into a terminal."""
    file = _file(module)
    try:
        return file.read_text("utf-8") if file else None
    except (OSError, UnicodeDecodeError):
        return None


def _file(module: str) -> Path | None:
    """The file of a module's text."""
    if module.startswith(f"{SCRIPT}:"):
        return Path(module.partition(":")[2])
    known = sys.modules.get(module)
    place = getattr(known, "__file__", None)
    if known is None and _parent_is_package(module):
        try:
            spec = find_spec(module)
        except (ImportError, AttributeError, ValueError):
            spec = None
        place = spec.origin if spec else None
    return Path(place) if place and place.endswith(".py") else None


def _parent_is_package(module: str) -> bool:
    """Whether a module can lie where its name says; looking for it below anything else would import that."""
    parent = module.rpartition(".")[0]
    return not parent or hasattr(sys.modules.get(parent), "__path__")


def _root(module: str) -> tuple[Path | None, str]:
    """The folder that a project's modules lie in, None if it is installed among others; and its first name."""
    file, top = _file(module), module.partition(".")[0]
    if file is None or _INSTALLED & set(file.parts):
        return None, top
    depth = 0 if module.startswith(f"{SCRIPT}:") else module.count(".") + (file.name == "__init__.py")
    return file.resolve().parents[depth], top


def _belongs(module: str, root: tuple[Path | None, str]) -> bool:
    """Whether a module is of the project with that root."""
    top, file = module.partition(".")[0], _file(module)
    if top == OURS:
        return False
    if top == root[1]:
        return True
    if root[0] is None or file is None:
        return False
    return file.resolve().is_relative_to(root[0]) and not _INSTALLED & set(file.resolve().relative_to(root[0]).parts)


def _public(module: str) -> str:
    """The name of a module, wherever its file lies."""
    return module.rpartition("_")[0] if module.startswith("raystride_plugin_") else module.partition(":")[0]
