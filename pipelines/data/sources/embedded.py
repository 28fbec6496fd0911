"""Built-in data sets, to try each task without a download.

    raystride train --task classification --data.source packages

packages      12 lines of the standard library → their package, of 20; about 6,500
docstrings    a function of the standard library without its docstring → the docstring's first line; about 6,000
digits        scikit-learn's handwritten digits (Alpaydin and Kaynak, 1998), 8 x 8 pixels → the digit; 1,797
arithmetic    every sum of two numbers below 100, to be learned in a minute; 10,000
reversal      4 to 12 English number words → the German ones, in reverse; 20,000

Their order is always the same. The first two come from the running Python.
"""

import ast
import io
import platform
import random
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from raystride.pipelines.data.plugins import register_source
from raystride.pipelines.data.sources.fields import data_uri

PACKAGES: dict[str, tuple[str, ...]] = {
    name: (name,)
    for name in (
        "argparse", "asyncio", "ctypes", "difflib", "email", "http", "importlib", "inspect", "json", "logging",
        "multiprocessing", "statistics", "tarfile", "typing", "unittest", "urllib", "xml",
    )
} | {"datetime": ("datetime", "_pydatetime"), "decimal": ("_pydecimal",), "pickle": ("pickle", "pickletools")}  # fmt: skip
"""The classes of `packages`, with their modules; none that a distribution of Python leaves out."""

SNIPPET_LINES = 12
"""Lines in a snippet of `packages`."""

_LEFT_OUT = {"test", "tests", "idle_test"}
_MAX_CODE = 1200
_MAX_SUMMARY = 120

_ENGLISH = (
    "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen "
    "nineteen twenty"
)
_GERMAN = (
    "eins zwei drei vier fünf sechs sieben acht neun zehn elf zwölf dreizehn vierzehn fünfzehn sechzehn siebzehn achtzehn "
    "neunzehn zwanzig"
)


@register_source("packages", version=platform.python_version())
def packages() -> Iterator[dict[str, str]]:
    """Snippets that do not overlap, none of them twice, without the lines that would give them away: see `snippets`."""
    seen = set()
    for label, modules in sorted(PACKAGES.items()):
        for path in [path for module in modules for path in _files(module)]:
            for text in snippets(path.read_text(encoding="utf-8"), label, {path.stem, path.parent.name} - {"__init__"}):
                if text not in seen:
                    seen.add(text)
                    yield {"text": text, "label": label}


def snippets(code: str, label: str, words: set[str]) -> Iterator[str]:
    """Yields each 12 lines of the code, without blank lines, imports, and lines with the label or one of `words`."""
    imported = {
        line
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    either = "|".join(map(re.escape, sorted(words)))
    telling = re.compile(rf"{label}|(?<![a-z])(?:{either})(?![a-z])", re.IGNORECASE)
    lines = [
        line.rstrip()
        for number, line in enumerate(code.splitlines(), 1)
        if line.strip() and number not in imported and not telling.search(line)
    ]
    for first in range(0, len(lines) - SNIPPET_LINES + 1, SNIPPET_LINES):
        yield "\n".join(lines[first : first + SNIPPET_LINES])


@register_source("docstrings", version=platform.python_version())
def docstrings() -> Iterator[dict[str, str]]:
    """Functions of at most 1,200 characters, none of them twice, and summaries of at most 120."""
    seen = set()
    for path in _files(""):
        code = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(code)):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or len(node.body) < 2:
                continue
            summary = (ast.get_docstring(node) or "").partition("\n")[0].strip()
            if not 0 < len(summary) <= _MAX_SUMMARY:
                continue
            node.body = node.body[1:]
            node.decorator_list = []
            text = ast.unparse(node)
            if len(text) <= _MAX_CODE and text not in seen:
                seen.add(text)
                yield {"text": text, "target": summary}


@register_source("digits")
def digits() -> Iterator[dict[str, str]]:
    """Images as PNG files, 17 shades of grey spread over 256."""
    from PIL import Image
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    found = load_digits()
    for pixels, digit in zip(found.images, found.target, strict=True):
        file = io.BytesIO()
        Image.fromarray((pixels * (255 / 16)).round().astype("uint8")).save(file, "png")
        yield {"image": data_uri(file.getvalue()), "label": str(digit)}


@register_source("reversal")
def reversal() -> Iterator[dict[str, str]]:
    """Pairs of sentences, none of them twice."""
    english, german, chance = _ENGLISH.split(), _GERMAN.split(), random.Random(0)
    seen: set[tuple[int, ...]] = set()
    while len(seen) < 20_000:
        words = tuple(chance.choices(range(len(english)), k=chance.randint(4, 12)))
        if words not in seen:
            seen.add(words)
            text, target = (english[word] for word in words), (german[word] for word in reversed(words))
            yield {"text": " ".join(text), "target": " ".join(target)}


def _files(module: str) -> list[Path]:
    """Returns the source files of a module of the standard library, or of all modules, without tests."""
    root = Path(sysconfig.get_path("stdlib"))
    below = root / module
    found = [below.with_suffix(".py")] if module and not below.is_dir() else sorted(below.rglob("*.py"))
    left_out = _LEFT_OUT | {"site-packages", "dist-packages", "lib2to3"}
    return [path for path in found if path.is_file() and not left_out & set(path.relative_to(root).parts)]


@register_source("arithmetic")
def arithmetic() -> Iterator[str]:
    """A toy: every sum of two numbers below 100, a document each. Small enough to learn in a minute."""
    for first in range(100):
        for second in range(100):
            yield f"{first}+{second}={first + second}"
