"""The journal: entries are read as they were written, in strict JSON, for any values."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raystride.pipelines.observability.record import journal as journal_module
from raystride.pipelines.observability.record.journal import (
    Journal,
    JournalTail,
    encode_entry,
    format_entries,
    join_segments,
    list_segments,
    read_entries,
    refuse_newer_entries,
    stream_entries,
    to_json_value,
)
from raystride.pipelines.observability.record.summary import put_summary
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.system.writer import WrittenByNewer
from tests.flips import flip
from tests.some import some
from tests.storage import uri as uri_of


def entry(sequence: int, kind: str = "metrics", time: float = 1.0, attempt: str = "a1", **values: Any) -> dict[str, Any]:
    """An entry as the recorder writes it."""
    return {
        "attempt": attempt,
        "sender": "rank0",
        "sequence": sequence,
        "kind": kind,
        "time": time,
        "step": sequence,
        "values": values,
    }


def refuse(constant: str) -> None:
    """Rejects NaN and infinity, as a strict JSON reader does."""
    raise ValueError(constant)


@given(st.dictionaries(st.text(), st.floats() | st.integers() | st.text() | st.none() | st.lists(st.floats())))
def test_a_line_is_strict_json_and_keeps_every_number(values: dict[str, Any]) -> None:
    line = encode_entry({"values": values})
    assert line.count("\n") == 1
    read = json.loads(line, parse_constant=refuse)["values"]
    for key, value in values.items():
        if isinstance(value, float):
            assert float(read[key]) == value or (math.isnan(value) and math.isnan(float(read[key])))
        elif not isinstance(value, list):
            assert read[key] == value


def test_numbers_of_numpy_and_torch_become_numbers() -> None:
    assert to_json_value({"a": np.float32(0.5), "b": torch.tensor(2), "c": Path("x"), "d": float("-inf")}) == {
        "a": 0.5,
        "b": 2,
        "c": "x",
        "d": "-Infinity",
    }
    assert to_json_value(torch.zeros(3)) == str(torch.zeros(3))


def test_segments_are_numbered_on_after_a_restart(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    assert Journal(folder, "a1").append([entry(1)]).name == "a1-000001.jsonl"
    again = Journal(folder, "a1")
    assert [line["sequence"] for line in again.entries()] == [1]
    assert again.append([entry(2)]).number == 2
    assert Journal(folder, "a1-b").append([entry(1, attempt="a1-b")]).attempt == "a1-b"
    assert [segment.name for segment in list_segments(folder)] == ["a1-000001.jsonl", "a1-000002.jsonl", "a1-b-000001.jsonl"]


def test_attempts_are_joined_in_the_order_in_which_they_began(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    Journal(folder, "zz").append([entry(1, time=1.0, attempt="zz"), entry(2, time=9.0, attempt="zz")])
    Journal(folder, "aa").append([entry(1, time=5.0, attempt="aa")])
    assert [(line["attempt"], line["sequence"]) for line in read_entries(folder)] == [("zz", 1), ("zz", 2), ("aa", 1)]
    join_segments(folder)
    (folder / "journal").remove()
    assert [line["attempt"] for line in read_entries(folder)] == ["zz", "zz", "aa"]  # from metrics.jsonl


def test_a_damaged_line_is_said_and_costs_no_other(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    Journal(folder, "a1").append([entry(1), entry(2), entry(3)])
    path = tmp_path / "journal/a1-000001.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)[:-1]  # as of 0.3, without a seal
    lines[0] = lines[0].replace(f'"writer":"{journal_module.__version__}",'.encode(), b"")
    path.write_bytes(lines[0] + lines[1][:20] + b"\xff\x00\n" + lines[2])
    join_segments(folder)
    assert [json.loads(line)["sequence"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 0, 3]
    assert "line 2 of a1-000001.jsonl is damaged" in (tmp_path / "log.txt").read_text()
    assert Journal(folder, "a1").append([entry(4)]).number == 2


def test_a_segment_without_lines_is_said_and_costs_no_other(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    for number in (1, 2):
        Journal(folder, "a1").append([entry(number)])
    path = tmp_path / "journal/a1-000002.jsonl"
    for damage in (lambda: path.write_bytes(b""), lambda: (path.unlink(), path.mkdir())):
        damage()
        (first, said) = read_entries(folder)
        assert first["sequence"] == 1
        assert said["values"] == {"name": "damaged", "text": "a1-000002.jsonl has no lines"}


def test_a_run_without_a_journal_has_no_entries(tmp_path: Path) -> None:
    assert read_entries(Folder(str(tmp_path / "nothing"))) == []


def test_on_an_object_store_the_journal_is_the_same() -> None:
    folder = Folder("memory://bucket/run")
    Journal(folder, "a1").append([entry(1), entry(2)])
    Journal(folder, "a1").append([entry(3)])
    assert [line["sequence"] for line in read_entries(folder)] == [1, 2, 3]
    assert join_segments(folder)["sequence"] == 3


@pytest.mark.parametrize(
    ("kind", "values", "shown"),
    [("metrics", {"train_loss": 2.34567891}, "train_loss 2.34568"), ("error", {"text": "ValueError: no"}, "ValueError: no")],
)
def test_readable_lines_say_what_happened(kind: str, values: dict[str, Any], shown: str) -> None:
    (line,) = format_entries([entry(7, kind, **values), entry(8, "system", cpu=3.0)])
    assert shown in line
    assert "step 7" in line


@pytest.fixture(params=["local", "remote"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    """A run's folder, on a disk and on a server of S3: fsspec's memory has one position for all who read a file at once."""
    monkeypatch.setattr(journal_module, "SEGMENTS_PER_FILE", 20)
    if request.param == "local":
        return Folder(str(tmp_path))
    return Folder(uri_of(request.getfixturevalue("s3"), f"journal{tmp_path}"))


def test_many_segments_become_few_files_and_nothing_is_lost_or_doubled(place: Folder) -> None:
    journal, count = Journal(place, "a1"), 3 * journal_module.SEGMENTS_PER_FILE + 7
    for number in range(1, count + 1):
        journal.append([entry(number)])
    assert len((place / "journal").names()) == 3 + 7
    assert [line["sequence"] for line in read_entries(place)] == list(range(1, count + 1))
    assert Journal(place, "a1").append([entry(count + 1)]).number == count + 1
    join_segments(place)
    assert place.read("metrics.jsonl").count(b"\n") == count + 1


def test_a_death_amid_a_merge_doubles_nothing(place: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(place, "a1")
    with monkeypatch.context() as dying:
        dying.setattr(Folder, "remove", lambda *_: None)  # it dies after the merged file, before the others are gone
        for number in range(1, journal_module.SEGMENTS_PER_FILE + 4):
            journal.append([entry(number)])
    assert len((place / "journal").names()) == journal_module.SEGMENTS_PER_FILE + 4
    assert [line["sequence"] for line in read_entries(place)] == list(range(1, journal_module.SEGMENTS_PER_FILE + 4))
    Journal(place, "a1")
    assert len((place / "journal").names()) == 4


def test_a_reader_that_meets_a_merge_reads_on_in_the_merged_file(place: Folder) -> None:
    journal = Journal(place, "a1")
    for number in range(1, journal_module.SEGMENTS_PER_FILE):
        journal.append([entry(number)])
    reader = stream_entries(place)
    read = [next(reader)["sequence"] for _ in range(5)]
    journal.append([entry(journal_module.SEGMENTS_PER_FILE)])
    assert len((place / "journal").names()) == 1
    assert read + [line["sequence"] for line in reader] == list(range(1, journal_module.SEGMENTS_PER_FILE + 1))


def test_a_tail_reads_each_entry_once(place: Folder) -> None:
    journal, tail, read = Journal(place, "a1"), JournalTail(place), []
    for number in range(1, journal_module.SEGMENTS_PER_FILE + 9):
        journal.append([entry(number)])
        if not number % 6:
            read += tail.read_new()
    read += tail.read_new()
    assert [line["sequence"] for line in read] == list(range(1, journal_module.SEGMENTS_PER_FILE + 9))
    assert tail.read_new() == []


def test_entries_with_any_bit_turned_are_left_out_and_told(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    journal = Journal(folder, "a1")
    for first in (1, 4):
        journal.append([entry(number, loss=0.5 + number) for number in range(first, first + 3)])
    right = read_entries(folder)
    assert [each["sequence"] for each in right] == [1, 2, 3, 4, 5, 6]
    merged = b"".join(folder.read(f"journal/a1-{number:06}.jsonl") for number in (1, 2))
    for name, whole in (("a1-000002.jsonl", folder.read("journal/a1-000002.jsonl")), ("a1-000001..000002.jsonl", merged)):
        for bit in some(range(0, 8 * len(whole), 31)):
            folder.put(f"journal/{name}", flip(whole, bit))
            found = read_entries(folder)
            kept = [each for each in found if each["kind"] == "metrics" and each["sequence"]]
            assert all(each in right for each in kept)
            damaged = [each["values"]["text"] for each in found if each["values"].get("name") == "damaged"]
            assert len(kept) == 6 or any(name in text for text in damaged)
        folder.put(f"journal/{name}", whole)
    assert read_entries(folder) == right


@pytest.mark.parametrize("merged", [False, True])
def test_lines_that_are_gone_are_told_wherever_a_segment_was_cut(tmp_path: Path, merged: bool) -> None:
    folder = Folder(str(tmp_path))
    journal, count = Journal(folder, "a1"), journal_module.SEGMENTS_PER_FILE if merged else 1
    for first in range(1, 2 * count, 2):
        journal.append([entry(first), entry(first + 1)])
    (path,) = (tmp_path / "journal").iterdir()
    right, lines = read_entries(folder), path.read_bytes().splitlines(keepends=True)
    for kept in some(range(0, len(lines), 7 if merged else 1)):
        path.write_bytes(b"".join(lines[:kept]))
        *found, said = read_entries(folder)
        assert found == right[: 2 * (kept // 3)]
        assert said["values"]["name"] == "damaged"
        assert path.name in said["values"]["text"]


def test_segments_that_are_gone_are_told_in_their_place(place: Folder) -> None:
    journal, tail = Journal(place, "a1"), JournalTail(place)
    for number in range(1, 8):
        journal.append([entry(number)])
    for number in (1, 4, 5):
        place.remove(f"journal/a1-{number:06}.jsonl")
    found = read_entries(place)
    assert [each["sequence"] for each in found] == [0, 2, 3, 0, 6, 7]
    said = [each["values"]["text"] for each in found if not each["sequence"]]
    assert said == ["the journal's segments 1 to 1 of a1 are gone", "the journal's segments 4 to 5 of a1 are gone"]
    assert [each["sequence"] for each in tail.read_new()] == [0, 2, 3, 0, 6, 7]
    assert tail.read_new() == []


def test_the_summary_knows_of_segments_and_attempts_that_are_gone_at_the_end(place: Folder) -> None:
    for attempt, count in {"a1": 3, "a2": 2, "a3": 1}.items():
        journal = Journal(place, attempt)
        for number in range(1, count + 1):
            journal.append([entry(number)])
    put_summary(place, {"run": "r"})
    assert len(read_entries(place)) == 6
    Journal(place, "a1").append([entry(4)])  # later ones are no damage
    for name in ("a2-000002", "a3-000001"):
        place.remove(f"journal/{name}.jsonl")
    said = [each["values"]["text"] for each in read_entries(place) if not each["sequence"]]
    assert said == ["the journal's segments 2 to 2 of a2 are gone", "the journal's segments 1 to 1 of a3 are gone"]
    place.put("summary.json", b"{")
    assert len(read_entries(place)) == 5


def test_segments_of_0_3_and_what_0_3_reads_of_ours(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    folder.put("journal/a1-000001.jsonl", "".join(encode_entry(entry(number)) for number in (1, 2)))
    Journal(folder, "a1").append([entry(3)])
    assert [each["sequence"] for each in read_entries(folder)] == [1, 2, 3]
    for line in folder.read("journal/a1-000002.jsonl").splitlines():  # as 0.3 does
        read = json.loads(line, parse_constant=refuse)
        assert {"sender", "sequence", "values", "time", "kind"} <= read.keys()
    assert b"seal" not in folder.read("log.txt")


def test_entries_of_a_newer_version_are_refused_by_name_where_one_would_act_on_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Folder(str(tmp_path))
    Journal(folder, "a1").append([entry(1), entry(2, kind="unheard_of")])
    refuse_newer_entries(folder)  # of this version: a kind that went away
    monkeypatch.setattr(journal_module, "__version__", "9.8.7")
    Journal(folder, "a2").append([entry(1, attempt="a2"), entry(2, attempt="a2") | {"unit": ""}])
    refuse_newer_entries(folder)
    for number, newer in enumerate(({"unit": "s"}, {"kind": "unheard_of"})):
        writer = Journal(folder, f"b{number}")
        writer.append([entry(1, attempt=f"b{number}"), entry(2, attempt=f"b{number}") | newer])
        named = "unit" if "unit" in newer else "entries `unheard_of`"
        with pytest.raises(WrittenByNewer, match=rf"journal was written by Raystride 9\.8\.7, .* does not know {named} \("):
            refuse_newer_entries(folder)
        assert len(read_entries(folder)) == 6, "who only shows them does"
        (folder / "journal").remove(list_segments(folder)[-1].name)
