"""All kinds of sources yield complete documents in order, for any split into slices, with the place of each."""

import bz2
import csv
import gzip
import json
import pickle
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raystride.pipelines.config import DataConfig
from raystride.pipelines.data.sources.source import Source, open_source, standard_library_files
from raystride.pipelines.data.tasks.task import Column, Document
from tests.errors import unreadable
from tests.pipelines.conftest import Prepare, documents, rows, settings
from tests.pipelines.data.prepare.tasks import ROWS, as_folders, as_json, as_lines
from tests.pipelines.data.sources.documents import open_documents

TEXTS = [f'document {i}: "naïve", 日本語\nsecond line, {"x" * (i % 7)}\r\nlast' for i in range(300)]
TINY = 0.002  # MiB a shard, so that small files are cut into many parts


def write_text(folder: Path) -> Path:
    for i, text in enumerate(TEXTS):
        (folder / f"{i:03d}.txt").write_bytes(text.encode())
    return folder


def write_json(folder: Path) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"n": 1, "text": text}, ensure_ascii=False) + "\n" for text in TEXTS))
    return path


def write_json_gz(folder: Path) -> Path:
    path = folder / "rows.ndjson.gz"
    path.write_bytes(gzip.compress(write_json(folder).read_bytes()))
    return path


def write_json_array(folder: Path) -> Path:
    path = folder / "rows.json"
    path.write_text(json.dumps([{"text": text} for text in TEXTS], indent=1))
    return path


def write_csv(folder: Path, suffix: str = ".csv") -> Path:
    path = folder / f"rows{suffix}"
    with path.open("w", newline="") as stream:
        writer = csv.writer(stream, delimiter="\t" if suffix == ".tsv" else ",")
        writer.writerows([["n", "text"], *([i, text] for i, text in enumerate(TEXTS))])
    return path


def write_tsv(folder: Path) -> Path:
    return write_csv(folder, ".tsv")


def write_parquet(folder: Path) -> Path:
    path = folder / "rows.parquet"
    pq.write_table(pa.table({"n": range(len(TEXTS)), "text": TEXTS}), path, row_group_size=40)
    return path


def write_saved_dataset(folder: Path) -> Path:
    import datasets

    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(folder / "saved")
    return folder / "saved"


def write_dataset_dict(folder: Path) -> Path:
    import datasets

    datasets.DatasetDict(train=datasets.Dataset.from_dict({"text": TEXTS})).save_to_disk(folder / "dict")
    return folder / "dict"


def opened(data: DataConfig, place: str) -> Source:
    return open_source(data, place, (Column("data.column", "text"),))


WRITERS = [
    write_text,
    write_json,
    write_json_gz,
    write_json_array,
    write_csv,
    write_tsv,
    write_parquet,
    write_saved_dataset,
    write_dataset_dict,
]


@pytest.mark.parametrize("write", WRITERS)
def test_documents_come_whole_and_in_order(tmp_path: Path, run: Prepare, write: object) -> None:
    (tmp_path / "data").mkdir()
    result = run(write(tmp_path / "data"), shard_mib=TINY, validation_fraction=0.2)  # type: ignore[operator]
    train, validation = documents(result, "train"), documents(result, "validation")
    assert sorted(train + validation) == sorted(TEXTS)
    assert [text for text in TEXTS if text in set(train)] == train
    assert [text for text in TEXTS if text in set(validation)] == validation
    assert 0.1 < len(validation) / len(TEXTS) < 0.3


@pytest.mark.parametrize("write", WRITERS[1:])
def test_the_tail_of_rows_is_the_last_rows(tmp_path: Path, run: Prepare, write: object) -> None:
    (tmp_path / "data").mkdir()
    result = run(write(tmp_path / "data"), shard_mib=TINY, validation="tail", validation_fraction=0.25)  # type: ignore[operator]
    train, validation = documents(result, "train"), documents(result, "validation")
    assert train + validation == TEXTS
    assert abs(len(validation) - 75) <= 3


def test_the_standard_library_is_found_without_tests_and_empty_files() -> None:
    names = [file.name for file in standard_library_files()]
    assert any(name.endswith("/json/decoder.py") for name in names)
    assert not any(part in name.split("/") for name in names for part in ("test", "tests", "site-packages"))
    assert names == sorted(names)
    assert sum(file.size for file in standard_library_files()) > 5e6


def test_a_registered_source(run: Prepare) -> None:
    result = run("arithmetic", validation="tail", validation_fraction=0.1)
    assert documents(result, "train")[:2] == ["0+0=0", "0+1=1"]
    assert documents(result, "validation")[-1] == "99+99=198"
    assert result.manifest.documents("validation") == 1000


def test_a_large_text_is_cut_and_ends_once(tmp_path: Path, run: Prepare) -> None:
    text = "".join(f"line {i} with ünïcode\n\n" for i in range(2000))
    (tmp_path / "big.txt").write_text(text)
    (tmp_path / "own.txt").write_text("validates")
    result = run(tmp_path / "big.txt", shard_mib=TINY, validation="source", validation_source=str(tmp_path / "own.txt"))
    assert len(result.manifest.splits["train"]) > 10
    assert documents(result, "train") == [text]
    assert documents(result, "validation") == ["validates"]
    found = rows(result, "train")
    assert [row["begins"] for row in found] == [True] + [False] * (len(found) - 1)
    assert [row["ends"] for row in found] == [False] * (len(found) - 1) + [True]
    assert result.manifest.documents("train") == 1


def test_a_document_cut_over_many_parts_stays_in_one_split(tmp_path: Path, run: Prepare) -> None:
    (tmp_path / "data").mkdir()
    texts = [f"document {i}, ünïcode\n" + "".join(f"{i} line {n}\n" for n in range(900)) for i in range(30)]
    for i, text in enumerate(texts):
        (tmp_path / f"data/{i:02d}.txt").write_text(text)
    result = run(tmp_path / "data", shard_mib=TINY, validation_fraction=0.3)
    train, validation = documents(result, "train"), documents(result, "validation")
    assert sorted(train + validation) == sorted(texts)
    assert len(result.manifest.splits["train"]) > 50
    assert 2 < len(validation) < 20


@pytest.mark.parametrize("text", ["日本語" * 4000, "a" * 12_000, "\n" * 9000, "word " * 3000])
def test_text_without_good_places_to_cut_is_kept_whole(tmp_path: Path, run: Prepare, text: str) -> None:
    (tmp_path / "one.txt").write_text(text)
    result = run(tmp_path / "one.txt", shard_mib=TINY, validation="tail", validation_fraction=0.3)
    assert documents(result, "train")[0] + documents(result, "validation")[0] == text


def test_the_ids_of_a_cut_text_are_those_of_the_whole(tmp_path: Path, run: Prepare) -> None:
    """Cuts lie where BPE patterns cut too."""
    from raystride.pipelines.data.tokenizers import load_tokenizer

    text = "".join(Path(file.uri).read_text(encoding="utf-8") for file in standard_library_files()[:20])
    (tmp_path / "code.txt").write_text(text)
    result = run(tmp_path / "code.txt", tokenizer="bpe", shard_mib=0.01, validation="source", validation_source="arithmetic")
    assert len(result.manifest.splits["train"]) > 10
    ids = [i for row in rows(result, "train") for i in row["ids"]]
    encoder = load_tokenizer(result.folder / "tokenizer")
    assert ids == [*encoder.encode(text).tolist(), encoder.end_id]


def test_compressed_text(tmp_path: Path, run: Prepare) -> None:
    text = "".join(f"{i} lines\n" for i in range(9000))
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(text.encode()) + gzip.compress(b"second member"))
    (tmp_path / "b.txt.bz2").write_bytes(bz2.compress(text.encode()))
    result = run(f"{tmp_path}/*.txt.*", validation="tail", validation_fraction=0.75)
    assert documents(result, "train") + documents(result, "validation")[:0] == [text[: int((2 * len(text) + 13) * 0.25)]]
    assert documents(result, "validation")[0] == text[int((2 * len(text) + 13) * 0.25) :] + "second member"
    assert documents(result, "validation")[1] == text


def test_globs_folders_and_uris_name_the_same_files(tmp_path: Path) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/.hidden").mkdir()
    for name in ("a/1.txt", "a/b/2.txt", "a/b/3.md", "a/.hidden/4.txt"):
        (tmp_path / name).write_text(name)
    data = settings("unused").data
    found = {
        place: [file.name for file in opened(data, f"{tmp_path}/{place}").files]
        for place in ("a", "a/*.txt", "a/**/*.txt", "a/b/[23].*", "a/b/?.md", "a/1.txt")
    }
    assert found == {
        "a": ["1.txt", "b/2.txt", "b/3.md"],
        "a/*.txt": ["1.txt"],
        "a/**/*.txt": ["1.txt", "b/2.txt"],
        "a/b/[23].*": ["2.txt", "3.md"],
        "a/b/?.md": ["3.md"],
        "a/1.txt": ["1.txt"],
    }
    uri = opened(data, f"file://{tmp_path}/a")
    assert uri.identity == opened(data, f"{tmp_path}/a").identity
    remote = opened(data, f"local://{tmp_path}/a")
    assert [file.name for file in remote.files] == found["a"]


def test_storage_and_data_on_any_file_system(tmp_path: Path) -> None:
    """fsspec's `local://` takes the way of every remote file system."""
    from tests.pipelines.conftest import prepared

    write_text(tmp_path)
    near = prepared(settings(f"{tmp_path}/*.txt"), tmp_path / "near")
    config = settings(f"local://{tmp_path}/*.txt")
    far = prepared(config, f"local://{tmp_path}/far")
    assert far.manifest.splits == near.manifest.splits
    assert (tmp_path / "far/.prepared").is_dir()
    assert prepared(config, f"local://{tmp_path}/far").reused


def test_what_a_folder_holds_must_be_clear(tmp_path: Path, run: Prepare) -> None:
    write_json(tmp_path)
    (tmp_path / "notes.md").write_text("about")
    with unreadable(str(tmp_path), settings=("data.source", "data.kind"), names=["(1 text, 1 json)"]):
        run(tmp_path)
    result = run(tmp_path, kind="json")
    assert sorted(documents(result, "train") + documents(result, "validation")) == sorted(TEXTS)


def test_a_folder_that_load_dataset_reads(tmp_path: Path, run: Prepare, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    write_parquet(tmp_path)
    result = run(tmp_path, kind="huggingface", shard_mib=TINY)
    assert sorted(documents(result, "train") + documents(result, "validation")) == sorted(TEXTS)
    with unreadable(str(tmp_path), settings=("data.split",), names=["data.split is 'dev'", "has train"]):
        run(tmp_path, kind="huggingface", split="dev")


LABELLED = (Column("data.column", "text"), Column("data.label_column", "label", "label"))
PAIR = (Column("data.column", "text"), Column("data.target_column", "target"))


def read(data: DataConfig, name: object, columns: tuple[Column, ...]) -> list[tuple[str, Document]]:
    found = pickle.loads(pickle.dumps(open_documents(data, str(name), columns)))
    return [item for part in found.parts for item in found.read(part)]


def test_all_columns_or_those_that_prediction_reads(tmp_path: Path) -> None:
    path = as_json(tmp_path)
    data = DataConfig(shard_mib=TINY)
    assert len(open_documents(data, str(path), LABELLED).parts) > 3
    assert [document for _, document in read(data, path, LABELLED)] == ROWS
    assert [document for _, document in read(data, path, LABELLED[:1])] == [(text,) for text, _ in ROWS]
    assert read(data, path, LABELLED)[0][0] == f"{path}, line 1"


def test_labels_that_are_not_asked_for_are_passed_over(tmp_path: Path) -> None:
    for write, kind in [(as_lines, "labelled"), (as_folders, "folders")]:
        (tmp_path / kind).mkdir()
        found = read(DataConfig(kind=kind), write(tmp_path / kind), LABELLED[:1])  # type: ignore[arg-type]
        assert {(text,) for text, _ in ROWS} <= {document for _, document in found}


def test_lines_without_targets_are_documents(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    (tmp_path / "b.txt").write_text("eins\n\nzwei\n")
    data = DataConfig(source="elsewhere", target_source="elsewhere.de")
    wanted = [(f"{tmp_path}/a.txt, line 1", ("one",)), (f"{tmp_path}/a.txt, line 3", ("two",))]
    assert read(data, f"{tmp_path}/a.txt", PAIR[:1]) == wanted
    assert read(DataConfig(kind="lines"), f"{tmp_path}/a.txt", PAIR[:1]) == wanted
    both = [document for _, document in read(data, f"{tmp_path}/a.txt,{tmp_path}/b.txt", PAIR)]
    assert both == [("one", "eins"), ("two", "zwei")]


def test_faults_are_raised_or_left_out(tmp_path: Path) -> None:
    lines = [json.dumps({"text": "a"}), json.dumps({"text": "b", "label": 1})]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    data = DataConfig()
    with unreadable(line=1, column="label"):
        read(data, tmp_path / "rows.jsonl", LABELLED)
    found = read(replace(data, on_error="skip"), tmp_path / "rows.jsonl", LABELLED)
    assert found == [(f"{tmp_path}/rows.jsonl, line 2", ("b", "1"))]


@pytest.mark.parametrize("split", [False, True])
def test_a_data_set_that_was_saved_anew_is_read_anew(tmp_path: Path, split: bool) -> None:
    """A notebook got the rows of the first."""
    import datasets

    found = []
    for number, text in enumerate(("first", "second")):
        rows = datasets.Dataset.from_dict({"text": [f"the {text} text"] * (number + 1)})
        (datasets.DatasetDict(train=rows) if split else rows).save_to_disk(tmp_path / "saved")
        documents = open_documents(DataConfig(), str(tmp_path / "saved"), (Column("data.column", "text"),))
        found.append([document for part in documents.parts for _, document in documents.read(part)])
    assert found == [[("the first text",)], [("the second text",)] * 2]
