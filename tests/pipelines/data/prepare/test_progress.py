"""Progress of a preparation, from the records of its parts."""

from pathlib import Path

import pytest

from raystride.pipelines.data.prepare import progress
from raystride.pipelines.data.prepare.progress import SPEED_FILE, ProgressMeter, describe_speeds, load_stages, show_progress
from raystride.pipelines.data.sources.pieces import File, Part, Slice
from raystride.pipelines.system import service_thread
from raystride.pipelines.system.storage.folder import Folder
from tests.flips import flip
from tests.waiting import wait_until


def part(number: int, size: int, stop: int | None = 1) -> Part:
    """Returns a part with this many bytes, of a packed file if its end is not known."""
    return Part(number, (Slice(File("/f", "f", size), 0, stop, size),), None)


def test_speed_and_time_left_are_of_the_parts_that_stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [50.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    folder = Folder(str(tmp_path))
    meter = ProgressMeter.for_parts((folder, [part(1, 30_000_000), part(2, 10_000_000), part(7, 20_000_000)]))
    assert (meter.total, meter.done) == (60_000_000, 0)
    now[0] = 53.0
    assert meter.read() == "0/3 parts, 0 MB"
    (folder / "parts").put_json("00001.json", {})
    (folder / "parts").put_json("00003.json", {})  # another's
    now[0] = 60.0
    assert meter.read() == "1/3 parts, 30 MB"
    assert meter.done == 30_000_000
    (folder / "parts").put_json("00002.json", {})
    now[0] = 65.0
    assert meter.read() == "2/3 parts, 40 MB, 2.0 MB/s, 10 s left", "what was before the first part is no part's time"
    assert ProgressMeter.for_parts((folder, [part(9, 1, None)])).read() == "0/1 parts, 0 MB"
    for number in range(3):
        (folder / "sections").put_json(f"00009-{number:04d}.json", {})
    assert ProgressMeter.for_parts((folder, [part(9, 1, None)])).read() == "0/1 parts, 0 MB, 3 shards of packed files"
    assert ProgressMeter.for_parts((folder, [])).total == 1


def test_lines_are_logged_without_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.001)
    lines: list[str] = []
    with show_progress("preparing", ProgressMeter.for_parts((Folder(str(tmp_path)), [part(1, 5)])), lines.append):
        wait_until(lambda: bool(lines), "a line")
    assert lines[0].startswith("preparing: 0/1 parts, ")


def test_lines_go_on_when_looking_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.001)
    monkeypatch.setattr(service_thread, "FIRST_PAUSE_S", 0.001)

    class Away(ProgressMeter):
        reads = 0

        def read(self) -> str:
            self.reads += 1
            if self.reads < 3:
                raise OSError("the storage is away")
            return super().read()

    lines: list[str] = []
    with show_progress("preparing", Away.for_parts((Folder(str(tmp_path)), [part(1, 5)])), lines.append):
        wait_until(lambda: len(lines) > 1, "a line after the error")
    assert lines[0] == "preparing: OSError: the storage is away; tried again"
    assert lines[1].startswith("preparing: 0/1 parts, ")


def test_stage_figures_with_any_bit_turned_are_shown_or_left_out(tmp_path: Path) -> None:
    """A turned bit in a key ended a resume in a traceback."""
    folder, whole = Folder(str(tmp_path)), b'{"bytes": 100, "documents": 7, "seconds": {"read": 0.5, "write": 1.5}}'
    for bit in range(8 * len(whole)):
        folder.put(SPEED_FILE, flip(whole, bit))
        if stages := load_stages(folder):
            assert describe_speeds(stages)
