"""The hash of a function changes with the code that it reaches in its project, and with nothing else."""

import importlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from raystride.pipelines.data.prepare.code_hash import hash_code, qualified_name

FILES = {
    "own/__init__.py": "",
    "own/steps.py": """
import re
from own import tables
from own.words import split as cut, unused
from .deep.inner import LIMIT

PATTERN = re.compile("a+")
KNOWN = {}
KNOWN["a"] = 1
OTHER = 5

def clean(table):
    return inner(table)

def inner(table):
    import own.lazily
    return cut(PATTERN, table[: LIMIT]) + tables.shape(own.lazily.late()), KNOWN

def another():
    return OTHER

if __name__ == "__main__":
    print(clean([]))
""",
    "own/words.py": """
import numpy as np
from beside import helper

def split(pattern, text):
    return helper(np.array(text))

def unused():
    return 1
""",
    "own/tables.py": """
WIDTH = 3

def shape(rows):
    return Base().rows(WIDTH)

class Base:
    def rows(self, width):
        return width

def other_shape():
    return 2
""",
    "own/lazily.py": "def late():\n    return 1\n",
    "own/deep/__init__.py": "",
    "own/deep/inner.py": "LIMIT = 9\nUNSEEN = 1\n",
    "own/never.py": "NUMBER = 1\n",
    "beside.py": "def helper(values):\n    return values\n",
    "tasks.py": """
from own.never import NUMBER
from own.words import unused

class Mine:
    def encode(self, document):
        return unused()

    def build_model(self):
        return NUMBER
""",
}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """Writes the files with a change (a file, some text, another one) and hashes a name of one of their modules."""
    monkeypatch.syspath_prepend(str(tmp_path))
    tops = {name.partition("/")[0].removesuffix(".py") for name in FILES}

    def forget() -> None:
        for module in [module for module in sys.modules if module.partition(".")[0] in tops]:
            del sys.modules[module]
        importlib.invalidate_caches()

    def hash_change(name: tuple[str, str], file: str = "", text: str = "", other: str = "") -> str:
        for path, content in FILES.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            assert path != file or text in content
            (tmp_path / path).write_text(content.replace(text, other) if path == file else content)
        forget()
        importlib.import_module(name[0])
        return hash_code([name])

    yield hash_change
    forget()


REACHED = [
    ("own/steps.py", "return inner(table)", "return inner(table[1:])"),
    ("own/steps.py", "table[: LIMIT]", "table[1:LIMIT]"),
    ("own/steps.py", "a+", "b+"),
    ("own/steps.py", '["a"] = 1', '["a"] = 2'),
    ("own/words.py", "np.array(text)", "np.array(text, str)"),
    ("own/tables.py", "WIDTH = 3", "WIDTH = 4"),
    ("own/tables.py", "return width", "return width + 1"),
    ("own/lazily.py", "return 1", "return 2"),
    ("own/deep/inner.py", "LIMIT = 9", "LIMIT = 8"),
    ("beside.py", "return values", "return values[1:]"),
]
NOT_REACHED = [
    ("own/steps.py", "OTHER = 5", "OTHER = 6"),
    ("own/steps.py", "print(clean([]))", "print(clean([1]))"),
    ("own/words.py", "return 1", "return 2"),
    ("own/tables.py", "return 2", "return 3"),
    ("own/deep/inner.py", "UNSEEN = 1", "UNSEEN = 2"),
    ("own/never.py", "NUMBER = 1", "NUMBER = 2"),
]


@pytest.mark.parametrize("change", REACHED, ids=" ".join)
def test_reached_code_changes_the_hash(project: Callable[..., str], change: tuple[str, str, str]) -> None:
    assert project(("own.steps", "clean")) != project(("own.steps", "clean"), *change)


@pytest.mark.parametrize("change", NOT_REACHED, ids=" ".join)
def test_unreached_code_leaves_the_hash(project: Callable[..., str], change: tuple[str, str, str]) -> None:
    before = project(("own.steps", "clean"))
    assert before == project(("own.steps", "clean"), *change)
    assert len(before) == 16


def test_a_task_s_model_is_no_data(project: Callable[..., str]) -> None:
    mine = ("tasks", "Mine")
    before = project(mine)
    assert project(mine, "own/never.py", "NUMBER = 1", "NUMBER = 2") == before
    assert project(mine, "tasks.py", "return NUMBER", "return 2 * NUMBER") == before
    assert project(mine, "own/words.py", "return 1", "return 2") != before
    assert project(mine, "tasks.py", "return unused()", "return 1 + unused()") != before


def test_installed_packages_and_raystride_are_not_of_a_project() -> None:
    assert hash_code([("raystride.pipelines.data.sources.embedded", "digits")]) == ""
    assert hash_code([("no_such_module", "clean")]) == ""
    json_dumps = qualified_name(partial(importlib.import_module("json").dumps, indent=1))
    assert json_dumps == ("json", "dumps")


def test_installed_code_may_stand_for_its_own_module_alone() -> None:
    names = [
        ("torch.nn.modules.linear", "Linear"),
        ("torch.nn.modules.linear", "Bilinear"),
        ("torch.nn.modules.loss", "MSELoss"),
    ]
    linear, bilinear, loss = (hash_code([name], follow_installed=False) for name in names)
    assert linear == bilinear != loss
