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


DEFINITIONS = [
    "VALUE = 1",
    "VALUE: int = 1",
    "OTHER, (VALUE, *REST) = 0, (1, 2)",
    "OTHER = VALUE = 1",
    "(VALUE := 1)",
    "VALUE = 0\nVALUE += 1",
    "VALUE = {}\nVALUE['a'] = 1",
    "VALUE = []\nVALUE.append(1)",
    "VALUE = {}\nVALUE['a']['b'] = 1",
    "ONE = 1\nVALUE = [ONE]",
    "ONE = 1\ndef VALUE(a=ONE): return a",
    "ONE = 1\ndef VALUE(a: ONE): return a",
    "ONE = 1\ndef VALUE(): return [lambda: ONE for _ in 'ab']",
    "def VALUE(): return 1",
    "async def VALUE(): return 1",
    "class VALUE:\n    a = 1",
    "class Base:\n    a = 1\nclass VALUE(Base): ...",
    "def mark(f):\n    return 1\n@mark\ndef VALUE(): ...",
    "if True:\n    VALUE = 1\nelse:\n    VALUE = 2",
    "try:\n    VALUE = 1\nexcept ImportError:\n    VALUE = 2\nfinally:\n    OTHER = 3",
    "try:\n    import nothing_there\nexcept ImportError:\n    def VALUE(): return 1",
    "try:\n    OTHER = 0\nexcept ImportError:\n    VALUE = 2\nelse:\n    def VALUE(): return 1",
    "for VALUE in (1,): pass",
    "for OTHER in 'a':\n    def VALUE(): return 1",
    "while True:\n    class VALUE:\n        a = 1\n    break",
    "import contextlib\nwith contextlib.suppress(ImportError):\n    def VALUE(): return 1",
    "import contextlib\nwith contextlib.suppress(ImportError):\n    from beside import VALUE",
    "try:\n    from beside import VALUE\nexcept ImportError:\n    VALUE = None",
    "try:\n    import beside as VALUE\nexcept ImportError:\n    VALUE = None",
    "match 1:\n    case 1:\n        def VALUE(): return 1",
    "from beside import VALUE",
    "from beside import *",
    "from beside import VALUE as OTHER\nVALUE = OTHER",
    "import beside\nVALUE = beside.VALUE",
    "import beside as other\ndef VALUE(): return other.VALUE",
    "def VALUE():\n    import beside\n    return beside.VALUE",
    "def VALUE():\n    from beside import VALUE as own\n    return own",
]


@pytest.mark.parametrize("definition", DEFINITIONS)
def test_every_way_to_define_what_is_reached_is_in_the_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, definition: str
) -> None:
    """The 1 in it becomes a 7; what else is in the module may change without a difference."""
    monkeypatch.syspath_prepend(str(tmp_path))
    hashes = []
    for number, rest in (("1", "0"), ("1", "5"), ("7", "0")):
        (tmp_path / "beside.py").write_text(f"VALUE = {number}\n")
        text = definition if "beside" in definition else definition.replace("1", number)
        (tmp_path / "defined.py").write_text(f"{text}\nUNUSED = {rest}\ndef use():\n    return VALUE\n")
        for module in ("beside", "defined"):
            sys.modules.pop(module, None)
        importlib.invalidate_caches()
        hashes.append(hash_code([("defined", "use")]))
    assert hashes[0] == hashes[1] != hashes[2]
