"""Speeds of a preparation's stages, from seconds summed over its parts."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from raystride.pipelines.data.prepare import progress as stage_speed
from raystride.pipelines.data.prepare.progress import SPEED_FILE, TimedIterator, describe_speeds, load_stages, sum_stages
from raystride.pipelines.system.storage.folder import Folder


def test_parts_add_up_and_those_that_say_nothing_do_not_count() -> None:
    one = {"bytes": 100, "documents": 2, "seconds": {"read": 0.5, "write": 0.12345, "clean": 0.0}}
    other = {"bytes": 50, "documents": 1, "seconds": {"read": 0.25, "tokenise": 2.0}}
    assert sum_stages([one, {}, other]) == {
        "bytes": 150,
        "documents": 3,
        "seconds": {"read": 0.75, "tokenise": 2.0, "write": 0.123},
    }
    assert sum_stages([{}, {}]) == {}


def test_speeds_are_of_text_in_the_order_of_the_stages() -> None:
    stages = {"bytes": 3e8, "documents": 50_000, "seconds": {"write": 0.1, "read": 2.0, "tokenise": 22.9}}
    assert describe_speeds(stages) == (
        "read 150 MB/s, tokenise 13.1 MB/s, write 3,000 MB/s of text in each process, 2,000 documents/s through all stages"
    )
    assert "99.9 MB/s" in describe_speeds({"bytes": 99.9e6, "documents": 1, "seconds": {"read": 1.0}})


def test_waiting_is_counted_for_the_stage_that_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(stage_speed.time, "perf_counter", lambda: now[0])

    def slow() -> Iterator[int]:
        for number in (1, 2):
            now[0] += number
            yield number
        now[0] += 10

    seconds = {"read": 1.0, "clean": 0.0}
    for _ in TimedIterator(slow(), seconds, "read"):
        now[0] += 100  # somebody else's
    assert seconds == {"read": 14.0, "clean": 0.0}


def test_stage_figures_are_read_back(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    assert load_stages(folder) == {}
    folder.put_json(SPEED_FILE, {"bytes": 1, "documents": 2, "seconds": {"read": 0.5}})
    assert load_stages(folder) == {"bytes": 1, "documents": 2, "seconds": {"read": 0.5}}
    folder.put(SPEED_FILE, b"{")
    assert load_stages(folder) == {}
