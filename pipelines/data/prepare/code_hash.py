"""Hash of user code that shapes data: a function and all project code that it reaches, by source text.

A function reaches the names that it mentions: other functions, classes and constants of its module, and names that it
imports from modules below the same root. Installed packages and Raystride itself are left out, as is code that nothing
mentions: editing the rest of a file causes no new preparation.

    hash_code([("my_project.cleaning", "clean")])             # 16 hexadecimal digits; "" if no source text is found
"""

import ast
import hashlib
import json
import linecache
import sys
from collections.abc import Iterable, Iterator
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from raystride.pipelines.data.plugins import OWN_PACKAGE
from raystride.pipelines.data.stored_code import FILE_PREFIX, SCRIPT

Name = tuple[str, str]
"""A module and a name in it; "*" for the whole module."""
MODEL_METHODS = ("build_model",)
"""Methods of a task that shape no data: neither their text nor names that they mention count."""
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_INSTALLED = {"site-packages", "dist-packages"}


def qualified_name(code: object) -> Name:
    """Returns the module of a function or class, and the top-level name that holds it."""
    while hasattr(code, "func"):  # functools.partial
        code = code.func
    made: Any = code if hasattr(code, "__qualname__") else type(code)
    module = made.__module__
    if module == SCRIPT:  # it may have travelled to a process of another script
        members = [made, *vars(made).values()] if isinstance(made, type) else [made]
        files = (member.__code__.co_filename for member in members if hasattr(member, "__code__"))
        module = f"{SCRIPT}:{next(files, '')}"
    return module, made.__qualname__.partition(".")[0]


def hash_code(names: Iterable[Name], *, follow_installed: bool = True) -> str:
    """Returns the hash of these functions and classes with all that they reach; "" if none of them has source text of its
    own.

    Without `follow_installed`, one of an installed package, `torch.nn.Linear` for instance, stands for its module's text.
    """
    found: set[tuple[str, str]] = set()
    seen: set[Name] = set()
    for start in names:
        root, waiting = _project_root(start[0]), [start]
        if root[0] is None and not follow_installed:
            found.add((start[0], _read_source(start[0]) or ""))
            continue
        while waiting:
            name = waiting.pop()
            if name in seen or not _is_in_project(name[0], root):
                continue
            seen.add(name)
            for text, more in _find_definitions(*name):
                if text is not None:
                    found.add((_canonical_module(name[0]), text))
                waiting += more
    return hashlib.sha256(json.dumps(sorted(found)).encode()).hexdigest()[:16] if found else ""


def _find_definitions(module: str, name: str) -> Iterator[tuple[str | None, list[Name]]]:
    """Yields the statements of a module that define a name, each as its text and the names that it mentions.

    Of a name that is imported the text is "", or None if other statements define it as well.
    """
    file = _source_file(module)
    source = _read_source(module)
    if source is None:
        return
    lines = source.splitlines()
    package = module if file and file.name == "__init__.py" else module.rpartition(".")[0]
    package = "" if module.startswith(f"{SCRIPT}:") else package
    statements = _top_level_statements(source)
    imported: dict[str, Name] = {}
    made: set[str] = set()
    for statement in statements:
        for import_ in _own_imports(statement):
            imported |= _imported_names(import_, package)
        if not isinstance(statement, ast.Import | ast.ImportFrom):
            made |= _bound_names(statement)
    if name in imported:
        yield None if name in made else "", [imported[name]]
    for statement in statements:
        if name == "*":
            for import_ in _own_imports(statement):
                yield "" if import_ is statement else None, list(_imported_names(import_, package).values())
        if isinstance(statement, ast.Import | ast.ImportFrom):
            continue
        if name != "*" and name not in (_bound_names(statement) | _mutated_names(statement)):
            continue
        skipped_lines = _model_lines(statement)
        text = "\n".join(
            line
            for number, line in enumerate(lines[statement.lineno - 1 : statement.end_lineno], statement.lineno)
            if number not in skipped_lines
        )
        yield text, list(_mentioned_names(statement, module, package, imported, made))


def _mentioned_names(
    statement: ast.stmt, module: str, package: str, imported: dict[str, Name], made: set[str]
) -> Iterator[Name]:
    """Yields the names of modules that a statement mentions, including those that it imports itself."""
    imported, nodes = dict(imported), list(_walk_without_models(statement))
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            imported |= _imported_names(node, package)
    if "*" in imported:
        yield imported["*"]
    owners = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    for node in nodes:
        first, attributes = _unroll_attributes(node)
        if not isinstance(first, ast.Name) or id(node) in owners:
            continue
        if first.id in made:
            yield module, first.id
        elif first.id in imported:
            module_name, name = imported[first.id]
            # helpers.clean: one name of a module, which need not be read as a whole.
            while name == "*" and attributes:
                name = attributes.pop()
                if _source_file(f"{module_name}.{name}"):
                    module_name, name = f"{module_name}.{name}", "*"
            yield module_name, name


def _unroll_attributes(node: ast.AST) -> tuple[ast.AST, list[str]]:
    """Returns the node at the base of a chain of attributes, and the attributes' names, the last one first."""
    attributes = []
    while isinstance(node, ast.Attribute):
        attributes.append(node.attr)
        node = node.value
    return node, attributes


def _walk_without_models(node: ast.AST) -> Iterator[ast.AST]:
    """Yields a node and all nodes below it except methods that build models."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not (isinstance(node, ast.ClassDef) and isinstance(child, ast.FunctionDef) and child.name in MODEL_METHODS):
            yield from _walk_without_models(child)


def _model_lines(statement: ast.stmt) -> set[int]:
    """Returns the line numbers of a class that build models."""
    body = statement.body if isinstance(statement, ast.ClassDef) else []
    models = [method for method in body if isinstance(method, ast.FunctionDef) and method.name in MODEL_METHODS]
    return {number for model in models for number in range(model.lineno, (model.end_lineno or model.lineno) + 1)}


def _imported_names(statement: ast.Import | ast.ImportFrom, package: str) -> dict[str, Name]:
    """Returns the names that an import binds, by their local name."""
    if isinstance(statement, ast.Import):
        return {
            alias.asname or alias.name.partition(".")[0]: (alias.name if alias.asname else alias.name.partition(".")[0], "*")
            for alias in statement.names
        }
    base = statement.module or ""
    if statement.level:
        parts = package.split(".")
        base = ".".join([*parts[: len(parts) - statement.level + 1], *([base] if base else [])])
    return {
        alias.asname or alias.name: (f"{base}.{alias.name}", "*")
        if _source_file(f"{base}.{alias.name}")
        else (base, alias.name)
        for alias in statement.names
    }


def _own_imports(statement: ast.stmt) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yields a top-level statement if it is an import, or the imports inside a `with`, a loop or a `match`."""
    if not isinstance(statement, _DEFINITIONS):
        yield from (node for node in ast.walk(statement) if isinstance(node, ast.Import | ast.ImportFrom))


def _bound_names(statement: ast.stmt) -> set[str]:
    if isinstance(statement, _DEFINITIONS):
        return {statement.name}
    nodes = list(ast.walk(statement))
    return {node.name for node in nodes if isinstance(node, _DEFINITIONS)} | {
        node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del)
    }


def _mutated_names(statement: ast.stmt) -> set[str]:
    """Returns the names that a statement may change without binding them: `TABLE["a"] = 1`, `TABLE.update(...)`."""
    if isinstance(statement, _DEFINITIONS):
        return set()
    owners = (node.value for node in ast.walk(statement) if isinstance(node, ast.Attribute | ast.Subscript))
    return {owner.id for owner in owners if isinstance(owner, ast.Name)}


@lru_cache(maxsize=256)
def _top_level_statements(source: str) -> tuple[ast.stmt, ...]:
    """Returns the statements at a module's top level, including those below a condition or in a `try`."""
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
            waiting += reversed(
                inner + [inside for handler in getattr(statement, "handlers", []) for inside in handler.body]
            )
        else:
            found.append(statement)
    return tuple(found)


def _read_source(module: str) -> str | None:
    """Returns a module's text, or that of a notebook's cell; None if it has none, for instance if it is compiled."""
    file = _source_file(module)
    try:
        return file.read_text("utf-8") if file else None
    except (OSError, UnicodeDecodeError):
        return "".join(linecache.getlines(str(file))) or None  # where IPython keeps its cells


def _source_file(module: str) -> Path | None:
    """Returns the file with a module's text."""
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
    """Returns whether the module's parent is a package, since searching below anything else would import the parent."""
    parent = module.rpartition(".")[0]
    return not parent or hasattr(sys.modules.get(parent), "__path__")


def _project_root(module: str) -> tuple[Path | None, str]:
    """Returns the root folder of a project's modules (None if it is installed in site-packages) and its top-level name."""
    file, top = _source_file(module), module.partition(".")[0]
    if file is None or _INSTALLED & set(file.parts):
        return None, top
    depth = 0 if module.startswith(f"{SCRIPT}:") else module.count(".") + (file.name == "__init__.py")
    return file.resolve().parents[depth], top


def _is_in_project(module: str, root: tuple[Path | None, str]) -> bool:
    """Returns whether a module belongs to the project with that root."""
    top, file = module.partition(".")[0], _source_file(module)
    if top == OWN_PACKAGE:
        return False
    if top == root[1]:
        return True
    if root[0] is None or file is None:
        return False
    return file.resolve().is_relative_to(root[0]) and not _INSTALLED & set(file.resolve().relative_to(root[0]).parts)


def _canonical_module(module: str) -> str:
    """Returns the name of a module, independent of the location of its file."""
    return module.rpartition("_")[0] if module.startswith(FILE_PREFIX) else module.partition(":")[0]
