"""The end of a preparation: counts of skipped and cut documents, empty splits, and complete shards."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raystride.pipelines.config import Config, DataConfig, TokenizerConfig
from raystride.pipelines.data.prepare.generations import GENERATIONS_FOLDER
from raystride.pipelines.data.prepare.manifest import Manifest, Shard, Shards
from raystride.pipelines.data.prepare.one_source import (
    PreparedData,
    _check_splits,
    _describe_counts,
    _load_done_records,
    build_manifest,
    build_publisher,
    is_worth_ray,
    load_finished_manifest,
    prepare_source,
)
from raystride.pipelines.data.prepare.parts import divide_into_parts
from raystride.pipelines.data.prepare.run_context import RunContext
from raystride.pipelines.data.sources.faults import DataError
from raystride.pipelines.data.sources.source import open_source
from raystride.pipelines.data.tasks import build_task
from raystride.pipelines.system.storage.folder import Folder
from tests.errors import unreadable
from tests.tiny import tiny, write_text


def shard(name: str, tokens: int = 10, documents: int = 2, size: int = 4) -> dict[str, Any]:
    """Returns the entry of a shard in a part's record."""
    known = {"file": name, "tokens": tokens, "documents": documents, "bytes": size, "sha256": "0" * 64, "ids_offset": 0}
    return vars(Shard(**known))


def record(number: int, **changes: Any) -> dict[str, Any]:
    """Returns a part's record, with a training shard."""
    shards = {"train": shard(f"train/{number:05d}.arrow"), "validation": None}
    return {"part": number, "shards": shards, "faults": [], "skipped": 0} | changes


def config_of(text: Path, **data: Any) -> Config:
    """Returns settings for preparing a text."""
    config = tiny(text)
    return replace(config, data=replace(config.data, **data))


def describe_records(config: Config, records: list[dict[str, Any]]) -> Manifest:
    """Returns the manifest of the records of all parts."""
    task = build_task(config).knowing({"vocabulary_size": 257, "end_id": 256, "more": "known"}, {})
    source = open_source(config.data, config.data.source, task.columns)
    return build_manifest(config.data, "digest", source, None, task, records)


def test_a_manifest_sums_the_records_of_its_parts(tmp_path: Path) -> None:
    text = write_text(tmp_path)
    records = [
        record(0, dropped={"too_short": 2, "own.step": 5}, cut=1),
        record(1, shards={"train": None, "validation": shard("validation/00001.arrow", 7)}, dropped={"own.step": -1}),
        record(2, cut=2, skipped=1, faults=[{"place": "a", "reason": "b"}]),
    ]
    found = describe_records(config_of(text), records)
    assert [each.file for each in found.splits["train"]] == ["train/00000.arrow", "train/00002.arrow"]
    assert [each.file for each in found.splits["validation"]] == ["validation/00001.arrow"]
    assert (found.tokens("train"), found.tokens("validation")) == (20, 7)
    size = text.stat().st_size
    assert found.source == {
        "kind": "text",
        "name": str(text),
        "files": 1,
        "bytes": size,
        "cut": 3,
        "skipped": 1,
        "dropped": {"too_short": 2, "own.step": 4},
    }
    assert found.skipped == [{"place": "a", "reason": "b"}], "all that was skipped has its name"
    assert (found.fingerprint, found.id_type, found.vocabulary_size, found.end_id) == ("digest", "uint16", 257, 256)
    assert (found.learned, found.tokenizers) == ({"more": "known"}, ["tokenizer"])
    plain = describe_records(config_of(text), [record(0)])
    assert (plain.source.keys(), plain.skipped) == ({"kind", "name", "files", "bytes"}, [])


def test_unnamed_skipped_documents_are_counted(tmp_path: Path) -> None:
    many = record(0, skipped=105, faults=[{"place": str(n), "reason": "r"} for n in range(100)])
    found = describe_records(
        config_of(write_text(tmp_path)), [many, record(1, skipped=2, faults=[{"place": "x", "reason": "r"}])]
    )
    assert len(found.skipped) == 102
    assert found.skipped[-1] == {"place": str(tmp_path / "text.txt"), "reason": "and 6 more documents"}


def manifest_with(train: int, validation: int, documents: int = 2) -> Manifest:
    """Returns a manifest with this many tokens in each split."""
    splits = {
        split: Shards.from_shards([Shard(**shard(f"{split}/0.arrow", tokens, documents))] if tokens else [])
        for split, tokens in (("train", train), ("validation", validation))
    }
    return Manifest(fingerprint="", id_type="uint16", vocabulary_size=4096, end_id=0, splits=splits)


@pytest.mark.parametrize(
    ("train", "validation", "data", "names", "settings"),
    [
        (0, 0, {}, ["no documents"], ["data.source"]),
        (5, 0, {}, ["for validation", "none of 2", "larger"], ["data.validation_fraction", "data.validation_source"]),
        (0, 5, {}, ["for training", "none of 2", "smaller"], ["data.validation_fraction", "data.validation_source"]),
        (5, 0, {"validation": "hash"}, ["--data.validation tail", "larger"], ["data.validation"]),
        (0, 5, {"validation": "hash"}, ["--data.validation tail", "smaller"], ["data.validation"]),
        (5, 0, {"validation": "source", "validation_source": "held"}, ["'held'", "validation"], ["data.validation_source"]),
        (0, 5, {"validation": "source", "validation_source": "held"}, ["text.txt'", "training"], ["data.source"]),
    ],
)
def test_an_empty_split_raises_with_a_remedy(
    tmp_path: Path, train: int, validation: int, data: dict[str, Any], names: list[str], settings: list[str]
) -> None:
    config = config_of(tmp_path / "text.txt", **data)
    with pytest.raises(DataError) as raised:
        _check_splits(config.data, manifest_with(train, validation))
    assert not [name for name in names if name not in str(raised.value)], str(raised.value)
    assert set(settings) <= set(raised.value.settings)
    assert ("data.validation" in raised.value.settings) == (data.get("validation") == "hash")


def test_splits_with_documents_pass(tmp_path: Path) -> None:
    _check_splits(config_of(tmp_path / "text.txt").data, manifest_with(1, 1))


def test_a_preparation_is_whole_while_all_files_are_as_they_were_written(tmp_path: Path) -> None:
    folder, written = Folder(str(tmp_path)), {"sha256": hashlib.sha256(b"1234").hexdigest()}
    names = {split: f"{split}/0.arrow" for split in ("train", "validation")}
    splits = {split: Shards.from_shards([Shard(**shard(name) | written)]) for split, name in names.items()}
    manifest = replace(manifest_with(5, 5), splits=splits)
    for name in (*names.values(), "tokenizer/tokenizer_kind.json"):
        folder.put(name, b"1234")
    assert load_finished_manifest(folder) is None
    manifest.save(folder)
    assert load_finished_manifest(folder) == manifest
    for name in (*names.values(), "tokenizer/tokenizer_kind.json"):
        for content in (b"123", b"4321"):
            folder.put(name, content)
            is_read = len(content) < 4 or name not in names.values()  # shards prove themselves where they are read
            assert (load_finished_manifest(folder) is None) == is_read, (name, content)
        folder.put(name, b"1234")
    assert load_finished_manifest(folder) == manifest
    (tmp_path / "train/0.arrow").unlink()
    assert load_finished_manifest(folder) is None
    folder.put("manifest.json", b"{")
    assert load_finished_manifest(folder) is None


def test_a_part_is_done_if_it_is_wanted_and_its_shards_are_as_they_were_written(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    for number in range(5):
        folder.put(f"train/{number:05d}.arrow", b"1234")
        own = shard(f"train/{number:05d}.arrow") | {"sha256": folder.sha256("train/00000.arrow")}
        put = record(number, shards={"train": own, "validation": None})
        (folder / "parts").put_json(f"{number:05d}.json", put)
    folder.put("train/00001.arrow", b"1235")
    folder.put("parts/00002.json", b"{")
    folder.put("parts/other.txt", b"")
    (folder / "parts").put_json("00005.json", {"part": 5})
    assert sorted(_load_done_records(folder, {0, 1, 2, 3, 5})) == [0, 3]
    assert _load_done_records(folder, set()) == {}
    assert _load_done_records(folder, {4})[4]["shards"]["train"]["file"] == "train/00004.arrow"


def test_counts_are_of_tokens_or_of_examples(tmp_path: Path) -> None:
    config = config_of(tmp_path / "text.txt")
    manifest = manifest_with(12345, 67, 1002)
    assert _describe_counts(manifest, build_task(config)) == "12,345 train and 67 validation tokens, vocabulary 4,096"
    labels = build_task(replace(config, task="classification"))
    assert _describe_counts(manifest, labels) == "1,002 train and 1,002 validation examples"


def test_the_first_generation_has_a_window_of_both_splits(tmp_path: Path) -> None:
    """A task without windows needs an example of both."""
    config = config_of(tmp_path / "text.txt", start_after_mib=2.0)
    task = build_task(config)
    assert task.window
    assert task.window.length == 17
    labels = build_task(replace(config, task="classification"))
    for tried, least in ((task, 17), (labels, 1)):
        job: Any = type("Job", (), {"folder": Folder(str(tmp_path)), "task": tried})
        publisher = build_publisher(config.data, job, lambda records: manifest_with(1, 1))
        assert publisher._min_bytes == 2 * 2**20
        assert publisher._is_sufficient(manifest_with(least, least))
        assert not publisher._is_sufficient(manifest_with(least - 1, least))
        assert not publisher._is_sufficient(manifest_with(least, least - 1))


def test_a_preparation_keeps_only_its_results_and_reuses_them(tmp_path: Path) -> None:
    config = config_of(write_text(tmp_path), start_after_mib=1e-3, shard_mib=0.003, kind="lines")
    lines: list[str] = []
    storage, task = Folder.from_uri(str(tmp_path / "storage")), build_task(config)
    first = prepare_source(RunContext(config, storage, log=lines.append), task, on_ray=False)
    assert first.folder == storage / ".prepared" / first.manifest.fingerprint
    assert first.folder.names() == [
        "documents.hashes",
        "documents.hashes.sha256",
        "files.parquet",
        "files.parquet.sha256",
        GENERATIONS_FOLDER,
        "manifest.json",
        "manifest.json.sha256",
        "stages.json",
        "tokenizer",
        "train",
        "validation",
    ]
    again = prepare_source(RunContext(config, storage, log=lines.append), task, on_ray=False)
    assert (first.reused, again.reused, again.manifest) == (False, True, first.manifest)
    assert len([line for line in lines if "prepared before" in line]) == 1
    first.folder.put("tokenizer/tokenizer_kind.json", '{"format": 1, "kind": "characters", "characters": "a"}')
    once_more = prepare_source(RunContext(config, storage, log=lines.append), task, on_ray=False)
    assert (once_more.reused, once_more.manifest) == (False, first.manifest)
    assert first.folder.read_json("tokenizer/tokenizer_kind.json")["kind"] == "bytes"
    assert PreparedData(first.folder, first.manifest, True, "l").identity.learned == "l"
    assert first.identity.data == first.manifest.fingerprint


def test_a_file_that_cannot_be_read_ends_a_preparation_unless_it_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for number in range(9):
        (tmp_path / f"data/{number}.txt").write_text(f"text {number} that is whole\n" * 20)
    (tmp_path / "data/9.txt").write_bytes(b"\xff\xfe\xfd" * 30)
    config = replace(tiny(tmp_path / "data"), data=DataConfig(source=str(tmp_path / "data"), validation_fraction=0.4))
    storage = Folder.from_uri(str(tmp_path / "storage"))
    with unreadable("9.txt"):
        prepare_source(RunContext(config, storage, log=lambda _: None), build_task(config), on_ray=False)
    skipping = replace(config, data=replace(config.data, on_error="skip"))
    found = prepare_source(RunContext(skipping, storage, log=lambda _: None), build_task(skipping), on_ray=False)
    assert [each["place"].endswith("9.txt") for each in found.manifest.skipped] == [True]


def test_repeated_documents_are_found_in_this_process_and_counted(tmp_path: Path) -> None:
    texts = [f"document {number} has words of its own: {number * 7919} and {number * 104729}" for number in range(30)]
    rows = [*texts, texts[3], texts[8]]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in rows))
    data = DataConfig(source=str(tmp_path / "rows.jsonl"), kind="json", near_duplicates=1.0, validation_fraction=0.3)
    config = replace(tiny(tmp_path / "rows.jsonl"), data=data)
    found = prepare_source(
        RunContext(config, Folder.from_uri(str(tmp_path / "storage")), log=lambda _: None), build_task(config), on_ray=False
    )
    assert sum(found.manifest.documents(split) for split in ("train", "validation")) == len(texts)
    assert sum(found.manifest.source["dropped"].values()) == 2


def test_small_data_does_not_wait_for_ray_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = write_text(tmp_path)
    config, lines = config_of(text), list[str]()
    context = RunContext(config, Folder.from_uri(str(tmp_path / "storage")), log=lines.append)
    # Not `ray.is_initialized`: another file's tests may have left this process a cluster.
    monkeypatch.setattr("raystride.pipelines.data.prepare.one_source._log_if_cluster_full", _refuse)
    found = prepare_source(context, build_task(config), on_ray="large")
    assert found.manifest.tokens("train")
    monkeypatch.setattr("raystride.pipelines.data.prepare.one_source.MAX_LOCAL_BYTES", text.stat().st_size - 1)
    other = replace(context, storage=Folder.from_uri(str(tmp_path / "other")))
    characters = replace(config, tokenizer=TokenizerConfig(kind="characters"))
    with pytest.raises(RuntimeError, match="asked for a cluster"):
        prepare_source(other.with_config(characters), build_task(characters), on_ray="large")
    assert prepare_source(other, build_task(config), on_ray="large").manifest, "bytes take a third of the time"


def _refuse(log: object) -> None:
    raise RuntimeError("asked for a cluster")


def _is_worth_ray(config: Config, **source: Any) -> bool:
    task = build_task(config)
    opened = open_source(config.data, config.data.source, task.columns)
    return is_worth_ray(config, task, replace(opened, **source), divide_into_parts(opened, None, config.data))


def test_data_of_unknown_size_and_expensive_data_are_prepared_on_the_cluster(tmp_path: Path) -> None:
    config = config_of(write_text(tmp_path))
    assert not _is_worth_ray(config)
    assert _is_worth_ray(config, kind="registered")
    assert _is_worth_ray(config, kind="huggingface")
    assert _is_worth_ray(replace(config, data=replace(config.data, min_characters=10)))
