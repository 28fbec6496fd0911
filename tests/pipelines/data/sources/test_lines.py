"""Lines of two files that belong together, and text in other encodings than UTF-8."""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raystride.pipelines.config import DataConfig, SettingError
from raystride.pipelines.data.tasks.task import Column
from raystride.pipelines.data.tokenizers import load_tokenizer
from tests.errors import refused, unreadable
from tests.pipelines.conftest import documents, prepared, rows, settings
from tests.pipelines.data.prepare.tasks import TINY, Pairs, made
from tests.pipelines.data.sources.documents import open_documents


def as_parallel(folder: Path, compress: bool = False) -> tuple[Path, Path]:
    names = [
        ("train.en", "".join(f"{i} häuser\n" for i in range(900))),
        ("train.de", "".join(f"haus {i}\n" for i in range(900))),
    ]
    found = []
    for name, text in names:
        path = folder / (name + ".gz" * compress)
        path.write_bytes(gzip.compress(text.encode()) if compress else text.encode())
        found.append(path)
    return found[0], found[1]


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("validation", ["hash", "tail"])
def test_lines_that_belong_together(tmp_path: Path, compress: bool, validation: str) -> None:
    source, target = as_parallel(tmp_path, compress)
    cut = {"validation": validation, "validation_fraction": 0.2, "shard_mib": TINY}
    config = settings(source, target_source=str(target), tokenizer="characters", **cut)
    result = made(Pairs, config, tmp_path / "runs")
    assert not compress or all(shard.file.startswith("train/00000-") for shard in result.manifest.splits["train"])
    first, second = (load_tokenizer(result.folder / name) for name in Pairs.tokenizers)
    found = []
    for split in ("train", "validation"):
        for row in rows(result, split):
            cut = row["loss_mask"].index(1)
            found.append((first.decode(row["ids"][: cut - 1]), second.decode(row["ids"][cut:])))
    wanted = [(f"{i} häuser", f"haus {i}") for i in range(900)]
    assert found == wanted if validation == "tail" else sorted(found) == sorted(wanted)


def test_files_of_unequal_length_do_not_belong_together(tmp_path: Path) -> None:
    source, target = as_parallel(tmp_path)
    with target.open("a") as stream:
        stream.write("one more")
    config = settings(source, target_source=str(target), on_error="skip")
    both = ("data.source", "data.target_source")
    with unreadable("train.en", settings=both, names=["train.en has 900 ", "train.de has 901"]):
        made(Pairs, config, tmp_path / "runs")
    config = settings(source, target_source=str(target), validation="source", validation_source=str(target))
    with unreadable("train.de", settings=("data.target_source",), names=["comma"]):
        made(Pairs, config, tmp_path / "runs")


def test_targets_of_a_task_that_has_none(tmp_path: Path) -> None:
    source, target = as_parallel(tmp_path)
    with unreadable("train.de", settings=("data.target_source",), names=["data.target_source", "task `language_model`"]):
        prepared(settings(source, target_source=str(target)), tmp_path / "runs")


@pytest.mark.parametrize("form", ["json", "parquet", "huggingface"])
def test_columns_inside_a_column(tmp_path: Path, form: str) -> None:
    import datasets

    content = [{"translation": {"en": f"{i}", "de": f"_{i}", "fr": "x" * 99}, "id": i} for i in range(60)]
    if form == "json":
        (tmp_path / "rows.json").write_text(json.dumps(content))
    elif form == "parquet":
        pq.write_table(pa.Table.from_pylist(content), tmp_path / "rows.parquet")
    else:
        features = {"translation": datasets.Translation(["en", "de", "fr"]), "id": datasets.Value("int64")}
        datasets.Dataset.from_list(content, datasets.Features(features)).save_to_disk(tmp_path / "rows.huggingface")
    columns = Column("data.column", "translation.de"), Column("data.target_column", "translation.en")
    found = open_documents(DataConfig(), f"{tmp_path}/rows.{form}", columns)
    assert [document for part in found.parts for _, document in found.read(part)] == [(f"_{i}", f"{i}") for i in range(60)]
    other = open_documents(DataConfig(), f"{tmp_path}/rows.{form}", (Column("data.column", "other.en"),))
    with unreadable(column="other.en", names=["translation, id"]):
        list(other.read(other.parts[0]))


def test_a_pair_of_which_one_line_is_empty(tmp_path: Path) -> None:
    source, target = tmp_path / "a.txt", tmp_path / "b.txt"
    source.write_text("one\ntwo\n\nfour\n" * 9)
    target.write_text("eins\n\n\nvier\n" * 9)
    config = settings(source, target_source=str(target), validation_fraction=0.5)
    with unreadable("a.txt", line=2, column="target"):
        made(Pairs, config, tmp_path / "runs")
    config = replace(config, data=replace(config.data, on_error="skip", validation="tail"))
    result = made(Pairs, config, tmp_path / "runs")
    assert sum(map(result.manifest.documents, ("train", "validation"))) == 18
    assert len(result.manifest.skipped) == 9


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16", "cp1252", "gbk"])
@pytest.mark.parametrize("ending", ["txt", "jsonl", "csv"])
def test_text_in_other_encodings(tmp_path: Path, encoding: str, ending: str) -> None:
    texts = [f"{i}: {'日本' if encoding in ('utf-16', 'gbk') else 'né'}, {'x' * (i % 50)}" for i in range(2000)]
    written = {
        "txt": "\n".join(texts),
        "jsonl": "\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in texts),
        "csv": "\n".join(["text", *(f'"{text}"' for text in texts)]),
    }[ending]
    (tmp_path / f"data.{ending}").write_bytes(written.encode(encoding))
    config = settings(tmp_path / f"data.{ending}", encoding=encoding, shard_mib=TINY, validation="tail")
    result = prepared(config, tmp_path / "runs")
    found = documents(result, "train"), documents(result, "validation")
    assert (found[0][0] + found[1][0] == written) if ending == "txt" else found[0] + found[1] == texts
    wrong = replace(config, data=replace(config.data, encoding="ascii"))
    with unreadable(settings=("data.encoding",), names=["ascii"]):
        prepared(wrong, tmp_path / "runs")


def test_only_encodings_of_text_are_taken() -> None:
    for name in ("latin1", "UTF8", "shift_jis"):
        DataConfig(encoding=name)
    for name in ("latin-7000", "hex", "zip"):
        with refused("data.encoding", names=["utf-8", "latin-1"]):
            DataConfig(encoding=name)
    with pytest.raises(SettingError, match=r"data.target_source .*--data.kind lines"):
        DataConfig(target_source="x", kind="csv")


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_lines_that_end_with_cr_alone_are_not_one(tmp_path: Path, name: str) -> None:
    pair, text = (Column("data.column", "text"), Column("data.target_column", "target")), b"one\rtwo\rthree\r"
    (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith("gz") else text)
    (tmp_path / "b.txt").write_bytes(b"eins\n")
    for data, columns in [
        (DataConfig(kind="lines"), pair[:1]),
        (DataConfig(kind="labelled"), (pair[0], Column("data.label_column", "label", "label"))),
        (DataConfig(source=str(tmp_path / name), target_source=str(tmp_path / "b.txt")), pair),
    ]:
        with unreadable(name, names=["CR"]):
            found = open_documents(data, str(tmp_path / name), columns)
            [list(found.read(part)) for part in found.parts]
    for content, wanted in [(b"progress 1\rprogress 2\nend\n", 2), (b"one\r\n", 1), (b"one\r", 1)]:
        (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
        found = open_documents(DataConfig(kind="lines"), str(tmp_path / name), pair[:1])
        assert len([document for part in found.parts for document in found.read(part)]) == wanted


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{\n "text": "hello"\n}\n', "line 1: is no JSON: it ends within an object; write each object on one line"),
        ('{"text": "hel\nlo"}\n', "line 1: is no JSON: it ends within an object"),
        ('{"text": "a"},\n{"text": "b"},\n', "line 1: ends with a comma; remove the commas between lines"),
        ('{"version": 2, "data": [{"text": "a"}]}', "is one object; 'data' may hold the rows; write that array alone"),
        ('{"text": ["a", "b"], "label": ["x", "y"]}\n', "is a table by columns; write each row as an object on a line"),
        ('{"text": {"0": "a", "1": "b"}}', "is a table by columns"),
        ('{"text": "a"}\n{"text": }\n', "line 2: is no JSON: Expecting value"),
        ('{"other": [{"text": "a"}]}\n{"text": "b"}\n', "line 1: has no column 'text' but other"),
    ],
)
def test_json_of_another_form_is_named(tmp_path: Path, content: str, said: str) -> None:
    """Such a file was "no JSON", or another column was advised."""
    (tmp_path / "rows.json").write_text(content)
    with unreadable("rows.json", names=[said]):
        found = open_documents(DataConfig(), str(tmp_path / "rows.json"), (Column("data.text_column", "text"),))
        [*found.read(found.parts[0])]
