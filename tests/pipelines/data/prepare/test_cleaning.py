"""Steps and filters change and drop documents, are counted, and report errors."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from raystride.pipelines.config import Config, DataConfig
from raystride.pipelines.data.prepare.cleaning import build_cleaning
from raystride.pipelines.data.prepare.fingerprint import identity
from raystride.pipelines.data.prepare.progress import describe_speeds, load_stages
from raystride.pipelines.data.tasks import build_task
from tests.errors import refused, unreadable
from tests.pipelines.conftest import documents, prepared, settings

HERE = "tests.pipelines.data.prepare.test_cleaning"


def lower(table: pa.Table) -> pa.Table:
    """Converts texts to lower case."""
    return table.set_column(0, "text", pc.utf8_lower(table["text"]))


def without_spam(table: pa.Table) -> pa.Table:
    """Drops spam."""
    return table.filter(pc.invert(pc.match_substring(table["text"], "spam")))


def broken(table: pa.Table) -> pa.Table:
    """Raises an error."""
    raise KeyError("no such word")


def nothing(table: pa.Table) -> None:
    """Returns no table."""


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
    config = settings(
        _source(tmp_path, texts), transforms=(f"{HERE}.lower", f"{HERE}.without_spam"), validation_fraction=0.3
    )
    result = prepared(config, tmp_path / "storage", log=said.append)
    assert _all(result) == sorted(f"text {number}" for number in range(60) if number % 3)
    assert result.manifest.source["dropped"] == {f"{HERE}.without_spam": 20}
    assert any(f"left out 20 by {HERE}.without_spam" in line for line in said)
    stages = load_stages(result.folder)
    assert {"clean", "read", "write"} <= stages["seconds"].keys()  # 60 short texts are tokenised in no time
    assert (stages["documents"], stages["bytes"]) == (40, sum(map(len, _all(result))))
    assert f"data: {describe_speeds(stages)}" in said


def test_long_texts_go_through_steps_whole(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Word " * 600_000)
    (tmp_path / "b.txt").write_text("other")
    config = settings(tmp_path / "*.txt", transforms=(f"{HERE}.lower",), validation="tail", validation_fraction=0.1)
    config_of_one = prepared(config, tmp_path / "storage")
    assert sum(map(len, _all(config_of_one))) == 600_000 * 5 + 5
    assert not any(text.count("W") for text in _all(config_of_one))


def test_filters_drop_by_length_and_language(tmp_path: Path) -> None:
    english = [f"This is a short sentence about the weather, number {number}." for number in range(30)]
    german = [f"Das ist ein kurzer Satz über das Wetter und den Hund, Nummer {number}." for number in range(10)]
    texts = [*english, *german, *["hi"] * 5, "This sentence goes on and on. " * 20]
    data = {"min_characters": 10, "max_characters": 200, "languages": ("en",), "validation_fraction": 0.3}
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
        source.name,
        line=1,
        column=column,
        settings=("data.transforms",),
        names=[f"data.transforms {step!r}", "part 0", cause],
    ):
        prepared(settings(source, transforms=(step,)), tmp_path / "storage")


@pytest.mark.parametrize(
    ("step", "cause"),
    [
        ("no_such_module.clean", "ModuleNotFoundError"),
        (f"{HERE}.no_such_function", "AttributeError"),
        (f"{HERE}.NO_FUNCTION", "int"),
    ],
)
def test_a_missing_step_raises(step: str, cause: str) -> None:
    config = Config(data=DataConfig(transforms=(step,)))
    with refused("data.transforms", (step,), names=[f"names {step!r}", cause]):
        build_cleaning(config.data, config.task, build_task(config))
    with refused("data.transforms", (step,)):
        identity(config, build_task(config))


def test_names_other_than_import_paths_raise() -> None:
    for name in ("clean", "my project.clean", "a..b", ""):
        with refused("data.transforms", (name,)):
            DataConfig(transforms=(name,))
    with refused("data.max_characters", 4):
        DataConfig(min_characters=5, max_characters=4)
    with refused("data.near_duplicates", 0.8, names=["task `images`"]):
        build_cleaning(
            (config := Config(task="images", data=DataConfig(near_duplicates=0.8))).data,
            (config := Config(task="images", data=DataConfig(near_duplicates=0.8))).task,
            build_task(config),
        )
    with refused("data.languages", ("xx",), names=["'xx'"]):
        build_cleaning(
            (config := Config(data=DataConfig(languages=("xx",)))).data,
            (config := Config(data=DataConfig(languages=("xx",)))).task,
            build_task(config),
        )


def test_the_code_of_a_step_is_part_of_the_fingerprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        config = settings(source, transforms=("own_cleaning.clean",))
        found.append(identity(config, build_task(config)).data)
        sys.dont_write_bytecode = before
    found += [identity(each, build_task(each)).data for each in (settings(source), settings(source, min_characters=1))]
    assert len(set(found)) == 4
    sys.modules.pop("own_cleaning", None)


def test_texts_at_the_length_bounds_are_kept(tmp_path: Path) -> None:
    texts = [letter * size for size, letter in zip((9, 10, 15, 20, 21), "abcde", strict=True)] * 3
    data = {"min_characters": 10, "max_characters": 20, "validation_fraction": 0.3}
    result = prepared(settings(_source(tmp_path, texts), **data), tmp_path / "storage")
    assert {len(text) for text in _all(result)} == {10, 15, 20}
    assert result.manifest.source["dropped"] == {"too short": 3, "too long": 3}
