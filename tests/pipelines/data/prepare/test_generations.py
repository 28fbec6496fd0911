"""Generations of a preparation: their parts do not depend on timing, and readers are told of its end."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raystride.pipelines.data.prepare import generations as module
from raystride.pipelines.data.prepare.generations import (
    GENERATIONS_FOLDER,
    Publisher,
    clear_failure,
    generations,
    publish_failure,
    read_failure,
    read_generation,
    validation_first,
)
from raystride.pipelines.data.prepare.manifest import Manifest, Shard, Shards
from raystride.pipelines.data.sources.faults import DataError
from raystride.pipelines.data.sources.pieces import File, Part, Slice
from raystride.pipelines.system import service_thread
from raystride.pipelines.system.storage.folder import Folder
from tests.waiting import wait_until


def part(number: int, size: int, split: str | None = None) -> Part:
    """Returns a part with this many bytes of text."""
    return Part(number, (Slice(File("/f", "f", size), 0, None, size),), split)


def describe(records: Sequence[Mapping[str, Any]]) -> Manifest:
    """Returns a manifest of some records, with a shard for each in the record's split."""
    splits = {
        split: Shards.from_shards(
            Shard(file=str(record["part"]), tokens=record["tokens"], documents=1, bytes=1, sha256="", ids_offset=0)
            for record in records
            if record["split"] == split
        )
        for split in ("train", "validation")
    }
    return Manifest(fingerprint="f", id_type="uint8", vocabulary_size=9, end_id=0, splits=splits, source={"kind": "lines"})


def has_both_splits(manifest: Manifest) -> bool:
    """Returns whether both splits have documents."""
    return manifest.tokens("train") > 0 and manifest.tokens("validation") > 0


class Preparing:
    """A preparation with parts that finish when a test says so."""

    def __init__(self, folder: Path, least: float, is_sufficient: Any = has_both_splits) -> None:
        self.folder = Folder(str(folder))
        self.publisher = Publisher(self.folder, least, describe, is_sufficient)

    def finish(self, *parts: Part) -> None:
        """Writes the records of parts, which marks them as finished."""
        for one in parts:
            record = {"part": one.number, "tokens": 5, "split": one.split or "train"}
            (self.folder / "parts").put_json(f"{one.number:05d}.json", record)

    def published(self) -> list[list[int]]:
        """Returns the parts of each generation, in order."""
        found, number = [], 0
        while manifest := read_generation(self.folder, number):
            shards = [shard for split in ("validation", "train") for shard in manifest.splits[split]]
            assert manifest.source == {"kind": "lines", "parts": len(shards)}
            found.append([int(shard.file) for shard in shards])
            number += 1
        return found


def test_parts_that_validate_come_first_and_others_stay_in_order() -> None:
    parts = [part(0, 1, "train"), part(1, 1), part(2, 1, "validation"), part(3, 1, "train"), part(4, 1, "validation")]
    assert [one.number for one in validation_first(parts)] == [2, 4, 0, 1, 3]


@given(sizes=st.lists(st.integers(1, 30), min_size=2, max_size=10), least=st.integers(0, 50), validating=st.integers(0, 3))
def test_a_generation_is_the_next_parts_that_are_as_much_as_they_have_to_be(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], least: int, validating: int
) -> None:
    splits = ["train" if number >= validating else "validation" for number in range(len(sizes))]
    parts = [part(number, size, split) for number, (size, split) in enumerate(zip(sizes, splits, strict=True))]
    preparing = Preparing(tmp_path_factory.mktemp("parts"), least)
    preparing.finish(*parts)
    with preparing.publisher.publishing(parts):
        pass
    expected: list[list[int]] = []
    group: list[int] = []
    for number in range(len(splits)):
        group.append(number)
        whole = bool(expected) or {splits[each] for each in group} == {"train", "validation"}
        if sum(sizes[each] for each in group) >= least and whole:
            expected, group = [*expected, group], []
    if group and (expected or {splits[each] for each in group} == {"train", "validation"}):
        expected.append(group)
    assert preparing.published() == expected
    assert preparing.publisher.has_generation is bool(expected)
    assert preparing.publisher.published == sum(map(len, expected))


def test_parts_are_published_while_others_are_prepared_and_none_before_the_ones_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "POLL_INTERVAL_S", 0.001)
    preparing, parts = Preparing(tmp_path, 20), [part(0, 10, "validation"), *(part(n, 10) for n in (1, 2, 3, 4))]
    with preparing.publisher.publishing(parts):
        preparing.finish(*parts[:2])
        wait_until(lambda: preparing.published() == [[0, 1]], "the first generation")
        preparing.finish(parts[3], parts[4])
        preparing.finish(parts[2])
        wait_until(lambda: preparing.published() == [[0, 1], [2, 3]], "the second generation")
    assert preparing.published() == [[0, 1], [2, 3], [4]]
    assert generations(preparing.folder) is None
    preparing.publisher.end()
    assert generations(preparing.folder) == 3


def test_insufficient_parts_wait_for_the_next_ones(tmp_path: Path) -> None:
    preparing = Preparing(tmp_path, 1)
    preparing.finish(part(0, 10), part(1, 10), part(2, 10, "validation"))
    with preparing.publisher.publishing([part(0, 10), part(1, 10)]):
        pass
    assert not preparing.publisher.has_generation
    with preparing.publisher.publishing([part(2, 10, "validation")]):
        pass
    assert preparing.published() == [[2, 0, 1]]
    assert preparing.publisher.has_generation


def test_an_interrupted_preparation_goes_on_behind_its_generations(tmp_path: Path) -> None:
    first = Preparing(tmp_path, 10)
    parts = [part(0, 10, "validation"), part(1, 10), part(2, 10), part(3, 10)]
    first.finish(*parts[:3])
    with first.publisher.publishing(parts[:3]):
        pass
    assert first.published() == [[0, 1], [2]]
    for again in (parts, [parts[3]]):
        second = Preparing(tmp_path, 10)
        assert (second.publisher.published, second.publisher.has_generation) == (3, True)
        if len(again) == 1:
            second.publisher.skip(3)
        else:
            assert second.published() == [[0, 1], [2]]
            continue
        second.finish(parts[3])
        with second.publisher.publishing(again):
            pass
    assert second.published() == [[0, 1], [2], [3]]
    second.publisher.end()
    assert generations(second.folder) == 3


def test_a_failure_is_published_until_another_preparation_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL_INTERVAL_S", 600.0)
    preparing = Preparing(tmp_path, 1)
    preparing.finish(part(0, 1, "validation"), part(1, 1))
    assert read_failure(preparing.folder) == ""
    with (
        pytest.raises(DataError, match="is not UTF-8"),
        preparing.publisher.publishing([part(0, 1, "validation"), part(1, 1)]),
    ):
        raise DataError("7.txt is not UTF-8")
    assert read_failure(preparing.folder) == "7.txt is not UTF-8"
    assert preparing.published() == [], "what is published rests on what is whole"
    with pytest.raises(KeyError) as raised, preparing.publisher.publishing([]):
        raise KeyError(read_failure(preparing.folder))
    assert raised.value.args == ("",)
    assert read_failure(preparing.folder) == "KeyError: ''", "who waits would wait for ever"
    publish_failure(preparing.folder, "no")
    clear_failure(preparing.folder)
    clear_failure(preparing.folder)
    assert read_failure(preparing.folder) == ""


def test_a_storage_that_fails_for_a_while_is_said_and_published_to_again_with_the_same_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "POLL_INTERVAL_S", 0.001)
    monkeypatch.setattr(service_thread, "FIRST_PAUSE_S", 0.001)
    lines: list[str] = []
    preparing, parts = Preparing(tmp_path, 10), [part(0, 5, "validation"), part(1, 5), part(2, 10), part(3, 10)]
    preparing.publisher = Publisher(preparing.folder, 10, describe, has_both_splits, lines.append)
    with preparing.publisher.publishing(parts):
        (tmp_path / GENERATIONS_FOLDER / "000000").parent.mkdir(exist_ok=True)
        (tmp_path / GENERATIONS_FOLDER / "000000").write_text("in the way of a folder")
        preparing.finish(*parts[:3])
        wait_until(lambda: bool(lines), "the line")
        (tmp_path / GENERATIONS_FOLDER / "000000").unlink()
        wait_until(lambda: preparing.published() == [[0, 1], [2]], "the generations")
        assert read_failure(preparing.folder) == ""
        preparing.finish(parts[3])
    assert preparing.published() == [[0, 1], [2], [3]]
    assert lines[0].startswith("generations: ")
    assert lines[0].endswith("; tried again")


def test_a_permanent_error_is_published_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL_INTERVAL_S", 0.001)

    def broken(records: Sequence[Mapping[str, Any]]) -> Manifest:
        raise RuntimeError("no such shard")

    folder = Folder(str(tmp_path))
    publisher, parts = Publisher(folder, 1, broken, has_both_splits), [part(0, 1)]
    (folder / "parts").put_json("00000.json", {"part": 0, "tokens": 5, "split": "train"})
    with pytest.raises(RuntimeError), publisher.publishing(parts):
        wait_until(lambda: read_failure(folder) == "RuntimeError: no such shard", "what is told")
    assert read_failure(folder) == "RuntimeError: no such shard"
