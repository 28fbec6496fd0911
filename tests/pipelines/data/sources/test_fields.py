"""Documents with several fields: all kinds of sources yield them, and broken ones are faults."""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from raystride.pipelines.config import DataConfig
from raystride.pipelines.data.sources.faults import DataError
from raystride.pipelines.data.sources.fields import data_uri
from raystride.pipelines.data.tasks.task import Column
from tests.errors import unreadable
from tests.pipelines.conftest import rows, settings
from tests.pipelines.data.prepare.tasks import (  # fmt: skip
    LABELS,
    ROWS,
    TINY,
    Labelled,
    Pictures,
    as_csv,
    as_dataset,
    as_folders,
    as_json,
    as_lines,
    as_parquet,
    made,
    pairs,
)
from tests.pipelines.data.sources.documents import open_documents

PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(40))
ANY = st.characters(exclude_categories=["Cs"])
TEXT_AND_LABEL = (Column("data.column", "text"), Column("data.label_column", "label", "label"))


@pytest.mark.parametrize("write", [as_json, as_csv, as_parquet, as_dataset, as_lines, as_folders])
def test_every_source_gives_texts_with_labels(tmp_path: Path, write: Callable[[Path], Path]) -> None:
    (tmp_path / "data").mkdir()
    kind = "labelled" if write is as_lines else "auto"
    config = settings(write(tmp_path / "data"), kind=kind, shard_mib=TINY, validation_fraction=0.2)
    result = made(Labelled, config, tmp_path / "runs")
    assert sorted(pairs(result)) == sorted(ROWS)
    assert result.manifest.learned == {"labels": sorted(LABELS)}
    assert result.manifest.facts == {"labels": sorted(LABELS), "vocabulary_size": 257, "end_id": 256}
    assert all(row["begins"] and row["ends"] for row in rows(result, "train"))
    assert "facts.json" not in result.folder.names()
    assert made(Labelled, config, tmp_path / "runs").reused


@given(
    content=st.lists(st.tuples(st.text(ANY, max_size=20), st.text(ANY, max_size=3)), min_size=1, max_size=30),
    shard_kib=st.floats(0.05, 1),
)
@hypothesis_settings(max_examples=30, deadline=None)
def test_rows_come_as_they_are_or_not_at_all(
    tmp_path_factory: pytest.TempPathFactory, content: list[tuple[str, str]], shard_kib: float
) -> None:
    path = tmp_path_factory.mktemp("any") / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"text": text, "label": label}) for text, label in content))
    data = DataConfig(shard_mib=shard_kib / 1024, on_error="skip")
    found = open_documents(data, str(path), TEXT_AND_LABEL)
    wanted = [(text, label.strip()) for text, label in content if text and label.strip()]
    assert [document for part in found.parts for _, document in found.read(part)] == wanted


def test_a_split_may_follow_a_datasets_name(tmp_path: Path) -> None:
    config = settings(f"{as_dataset(tmp_path)}#test", validation_fraction=0.5)
    assert sorted(pairs(made(Labelled, config, tmp_path / "runs"))) == sorted(ROWS[:40])


def test_equal_texts_are_on_one_side(tmp_path: Path) -> None:
    content = [{"text": f"text {i // 5}", "label": i} for i in range(200)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, content)))
    result = made(Labelled, settings(tmp_path / "rows.jsonl", validation_fraction=0.3), tmp_path / "runs")
    sides = [{tuple(row["ids"][1:]) for row in rows(result, split)} for split in ("train", "validation")]
    assert not sides[0] & sides[1]
    assert sum(map(len, sides)) == 40


def test_parts_are_measured_by_the_columns_that_are_read(tmp_path: Path) -> None:
    from raystride.pipelines.data.sources.source import open_source

    text, big = TEXT_AND_LABEL[0], Column("data.column", "big")
    path = as_parquet(tmp_path)
    sizes = []
    for columns in ((text,), (big,), (text, big)):
        source = open_source(DataConfig(source=str(path)), str(path), columns)
        sizes.append(sum(piece.bytes for piece in source.reader.slices(source.files[0], 1)))
    assert sizes[2] == sizes[0] + sizes[1]


FAULTS = [
    ('{"text": "a"}', r"line 7: has no column 'label' but text; name .* label with --data.label_column"),
    ('{"text": "a", "label": null}', r"line 7: column 'label' is empty; .*--data.label_column.*--data.on_error skip"),
    ('{"text": "", "label": "a"}', r"line 7: column 'text' is empty; .*--data.column"),
    ('{"text": "a", "label": 1.5}', r"line 7: column 'label' holds a float, not a usable label"),
    ('{"text": 1, "label": "a"}', r"line 7: column 'text' holds a int, not text; .*--data.column"),
    ('{"text": "a", "label": "\\ud800"}', r"line 7: column 'label' is not UTF-8"),
    ('{"text": "(unreadable)", "label": "ham"}', r"rows.jsonl, line 7: is unreadable; .*--data.on_error skip"),
]


@pytest.mark.parametrize(("line", "reason"), FAULTS)
def test_a_row_that_lacks_something_is_a_fault(tmp_path: Path, line: str, reason: str) -> None:
    lines = [json.dumps({"text": text, "label": label}) for text, label in ROWS]
    (tmp_path / "rows.jsonl").write_text("\n".join([*lines[:6], line, *lines[6:]]))
    config = settings(tmp_path / "rows.jsonl", validation_fraction=0.2)
    with pytest.raises(DataError, match=reason):
        made(Labelled, config, tmp_path / "runs")
    config = replace(config, data=replace(config.data, on_error="skip"))
    result = made(Labelled, config, tmp_path / "runs")
    assert sorted(pairs(result)) == sorted(ROWS)
    assert len(result.manifest.skipped) == 1


def test_labelled_lines_with_faults(tmp_path: Path) -> None:
    for line, reason in [("__label__a __label__b both", "line 2: has more than one label"), ("spam", "line 2: .*'text' is")]:
        (tmp_path / "rows.txt").write_text(f"ham good\n{line}\n")
        with pytest.raises(DataError, match=reason):
            made(Labelled, settings(tmp_path / "rows.txt", kind="labelled"), tmp_path / "runs")


def test_a_source_without_the_columns_says_what_would_have_them(tmp_path: Path) -> None:
    (tmp_path / "some.txt").write_text("text")
    for source in (tmp_path / "some.txt", "python"):
        with unreadable(str(source), settings=("data.source", "data.kind"), names=["text alone", "data.label_column"]):
            made(Labelled, settings(source), tmp_path / "runs")
    with unreadable(str(tmp_path), settings=("data.source",), names=["text files in folders"]):
        made(Labelled, settings(tmp_path, kind="folders"), tmp_path / "runs")


def test_registered_functions_yield_tuples_and_dicts(tmp_path: Path) -> None:
    from collections.abc import Iterator

    from raystride.pipelines.data.plugins import SOURCES, register_source

    @register_source("mails")
    def mails() -> Iterator[Any]:
        chance = random.Random(1)
        for number in range(50):
            yield (
                (f"mail {number}", "ham") if chance.random() < 0.5 else {"label": "spam", "text": f"mail {number}", "id": 7}
            )

    @register_source("lonely")
    def lonely() -> Iterator[Any]:
        yield "a text alone"

    try:
        result = made(Labelled, settings("mails", validation_fraction=0.3), tmp_path)
        assert sorted(text for text, _ in pairs(result)) == sorted(f"mail {number}" for number in range(50))
        with unreadable(names=["lonely", "document 1: ", " 1 values ", "columns text, label"]):
            made(Labelled, settings("lonely"), tmp_path)
    finally:
        del SOURCES["mails"], SOURCES["lonely"]


def with_images(folder: Path, form: str) -> Path:
    (folder / "pictures").mkdir()
    values: list[Any] = []
    for number in range(40):
        content = PNG + bytes([number])
        (folder / f"pictures/{number}.png").write_bytes(content)
        values.append({"bytes": content, "path": None, "uri": data_uri(content), "file": f"pictures/{number}.png"})
    labels = ["odd" if number % 2 else "even" for number in range(40)]
    if form == "folders":
        for number, label in enumerate(labels):
            (folder / label).mkdir(exist_ok=True)
            (folder / f"pictures/{number}.png").rename(folder / label / f"{number}.png")
        (folder / "pictures").rmdir()
        return folder
    if form in ("file", "uri"):
        lines = [json.dumps({"image": v[form], "label": label}) for v, label in zip(values, labels, strict=True)]
        (folder / "rows.jsonl").write_text("\n".join(lines))
        return folder / "rows.jsonl"
    if form == "hub":
        import datasets

        features = {"image": datasets.Image(), "label": datasets.ClassLabel(names=["even", "odd"])}
        content = {"image": [{"bytes": v["bytes"], "path": None} for v in values], "label": [n % 2 for n in range(40)]}
        datasets.Dataset.from_dict(content, datasets.Features(features)).save_to_disk(folder / "saved")
        return folder / "saved"
    images = [{"bytes": v["bytes"], "path": None} if form == "struct" else v["bytes"] for v in values]
    pq.write_table(pa.table({"image": images, "label": labels}), folder / "rows.parquet")
    return folder / "rows.parquet"


@pytest.mark.parametrize("form", ["folders", "file", "uri", "struct", "bytes", "hub"])
def test_images_come_as_their_bytes(tmp_path: Path, form: str) -> None:
    (tmp_path / "data").mkdir()
    config = settings(with_images(tmp_path / "data", form), validation_fraction=0.3)
    result = made(Pictures, config, tmp_path / "runs")
    assert (result.manifest.id_type, result.manifest.vocabulary_size, result.manifest.end_id) == ("uint8", 0, 0)
    assert "tokenizer" not in result.folder.names()
    found = sorted(bytes(row["ids"]) for split in ("train", "validation") for row in rows(result, split))
    assert found == sorted(bytes([number % 2]) + PNG + bytes([number]) for number in range(40))


def test_an_image_that_is_not_there(tmp_path: Path) -> None:
    path = with_images(tmp_path, "file")
    (tmp_path / "pictures/7.png").unlink()
    with unreadable("rows.jsonl", line=8, column="image", names=["/pictures/7.png", "gone"]):
        made(Pictures, settings(path), tmp_path / "runs")
