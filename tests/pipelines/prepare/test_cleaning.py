"""Steps and filters change and leave out documents, are counted, and name what goes wrong."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from raystride.pipelines.config import Config, Data
from raystride.pipelines.prepare.cleaning import cleaning_of
from raystride.pipelines.prepare.fingerprint import fingerprint
from raystride.pipelines.prepare.stage_speed import kept_stages, speeds
from raystride.pipelines.tasks import build_task
from tests.errors import refused, unreadable
from tests.pipelines.conftest import documents, prepared, settings

HERE = "tests.pipelines.prepare.test_cleaning"


def lower(table: pa.Table) -> pa.Table:
    """Writes in lower case."""
    return table.set_column(0, "text", pc.utf8_lower(table["text"]))


def without_spam(table: pa.Table) -> pa.Table:
    """Leaves out what is spam."""
    return table.filter(pc.invert(pc.match_substring(table["text"], "spam")))


def broken(table: pa.Table) -> pa.Table:
    """Fails."""
    raise KeyError("no such word")


def nothing(table: pa.Table) -> None:
    """Forgets to return the table."""


def another(table: pa.Table) -> pa.Table:
    """Renames the column."""
    return table.rename_columns(["words", "place"])


def no_text(table: pa.Table) -> pa.Table:
    """Empties the column."""
    return pa.table({"text": pa.nulls(table.num_rows)})


NO_FUNCTION = 3


def _source(folder: Path, texts: list[str]) -> Path:
    path = folder / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def _all(result: Any) -> list[str]:
    return sorted(documents(result, "train") + documents(result, "validation"))


def test_steps_change_and_leave_out_documents_in_their_order(tmp_path: Path) -> None:
    texts = [f"Text {number}{' SPAM' if number % 3 == 0 else ''}" for number in range(60)]
    said: list[str] = []
    config = settings(_source(tmp_path, texts), steps=(f"{HERE}.lower", f"{HERE}.without_spam"), validation_fraction=0.3)
    result = prepared(config, tmp_path / "storage", echo=said.append)
    assert _all(result) == sorted(f"text {number}" for number in range(60) if number % 3)
    assert result.manifest.source["dropped"] == {f"{HERE}.without_spam": 20}
    assert any(f"left out 20 by {HERE}.without_spam" in line for line in said)
    stages = kept_stages(result.folder)
    assert sorted(stages["seconds"]) == ["clean", "read", "tokenise", "write"]
    assert (stages["documents"], stages["bytes"]) == (40, sum(map(len, _all(result))))
    assert f"data: {speeds(stages)}" in said


def test_long_texts_go_through_steps_whole(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Word " * 600_000)
    (tmp_path / "b.txt").write_text("other")
    config = settings(tmp_path / "*.txt", steps=(f"{HERE}.lower",), validation="tail", validation_fraction=0.1)
    config_of_one = prepared(config, tmp_path / "storage")
    assert sum(map(len, _all(config_of_one))) == 600_000 * 5 + 5
    assert not any(text.count("W") for text in _all(config_of_one))


def test_filters_leave_out_what_is_short_long_or_in_another_language(tmp_path: Path) -> None:
    english = [f"This is a short sentence about the weather, number {number}." for number in range(30)]
    german = [f"Das ist ein kurzer Satz über das Wetter und den Hund, Nummer {number}." for number in range(10)]
    texts = [*english, *german, *["hi"] * 5, "This sentence goes on and on. " * 20]
    data = {"least_characters": 10, "most_characters": 200, "languages": ("en",), "validation_fraction": 0.3}
    result = prepared(settings(_source(tmp_path, texts), **data), tmp_path / "storage")
    assert _all(result) == sorted(english)
    assert result.manifest.source["dropped"] == {"in other languages": 10, "too short": 5, "too long": 1}


@pytest.mark.parametrize(
    ("step", "column", "cause"),
    [
        ("broken", "", "KeyError: 'no such word'"),
        ("nothing", "", "NoneType"),
        ("another", "text", "'text'"),
        ("no_text", "text", "not all text"),
    ],
)
def test_a_step_that_fails_is_named_with_its_part_and_cause(tmp_path: Path, step: str, column: str, cause: str) -> None:
    source, step = _source(tmp_path, ["a", "b"]), f"{HERE}.{step}"
    with unreadable(
        source.name, line=1, column=column, settings=("data.steps",), names=[f"data.steps {step!r}", "part 0", cause]
    ):
        prepared(settings(source, steps=(step,)), tmp_path / "storage")


@pytest.mark.parametrize(
    ("step", "cause"),
    [
        ("no_such_module.clean", "ModuleNotFoundError"),
        (f"{HERE}.no_such_function", "AttributeError"),
        (f"{HERE}.NO_FUNCTION", "int"),
    ],
)
def test_a_step_that_is_not_there_is_refused(step: str, cause: str) -> None:
    config = Config(data=Data(steps=(step,)))
    with refused("data.steps", (step,), names=[f"names {step!r}", cause]):
        cleaning_of(config, build_task(config))
    with refused("data.steps", (step,)):
        fingerprint(config, build_task(config))


def test_names_that_are_no_import_paths_are_refused() -> None:
    for name in ("clean", "my project.clean", "a..b", ""):
        with refused("data.steps", (name,)):
            Data(steps=(name,))
    with refused("data.most_characters", 4):
        Data(least_characters=5, most_characters=4)
    with refused("data.near_duplicates", 0.8, names=["task `images`"]):
        cleaning_of(config := Config(task="images", data=Data(near_duplicates=0.8)), build_task(config))
    with refused("data.languages", ("xx",), names=["'xx'"]):
        cleaning_of(config := Config(data=Data(languages=("xx",))), build_task(config))


def test_what_a_step_is_made_of_is_part_of_the_fingerprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, module = _source(tmp_path, ["a"]), tmp_path / "own_cleaning.py"
    monkeypatch.syspath_prepend(str(tmp_path))
    found = []
    for body in ("return table", "return table.slice(1)"):
        module.write_text(f"def clean(table):\n    {body}\n")
        import importlib
        import linecache
        import sys

        sys.modules.pop("own_cleaning", None)
        importlib.invalidate_caches()
        linecache.clearcache()
        sys.dont_write_bytecode, before = True, sys.dont_write_bytecode
        config = settings(source, steps=("own_cleaning.clean",))
        found.append(fingerprint(config, build_task(config)))
        sys.dont_write_bytecode = before
    found += [fingerprint(each, build_task(each)) for each in (settings(source), settings(source, least_characters=1))]
    assert len(set(found)) == 4
    sys.modules.pop("own_cleaning", None)


def test_bounds_of_a_texts_length_are_among_what_stays(tmp_path: Path) -> None:
    texts = [letter * size for size, letter in zip((9, 10, 15, 20, 21), "abcde", strict=True)] * 3
    data = {"least_characters": 10, "most_characters": 20, "validation_fraction": 0.3}
    result = prepared(settings(_source(tmp_path, texts), **data), tmp_path / "storage")
    assert {len(text) for text in _all(result)} == {10, 15, 20}
    assert result.manifest.source["dropped"] == {"too short": 3, "too long": 3}
