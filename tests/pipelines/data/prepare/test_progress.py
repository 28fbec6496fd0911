"""Progress of a preparation, from the records of its parts."""

import gzip
from pathlib import Path

import pytest

from raystride.pipelines.data.prepare import progress
from raystride.pipelines.data.prepare.progress import SPEED_FILE, ProgressMeter, describe_speeds, load_stages, show_progress
from raystride.pipelines.data.sources import streams
from raystride.pipelines.data.sources.lines import LineReader
from raystride.pipelines.data.sources.pieces import File, Part, Slice
from raystride.pipelines.data.sources.streams import position_in_file
from raystride.pipelines.data.tasks.task import Column
from raystride.pipelines.system import service_thread
from raystride.pipelines.system.storage.folder import Folder
from tests.flips import flip
from tests.waiting import wait_until


def part(number: int, size: int) -> Part:
    """Returns a part with this many bytes."""
    return Part(number, (Slice(File("/f", "f", size), 0, 1, size),), None)


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
    assert ProgressMeter.for_parts((folder, [])).total == 1


def test_a_packed_file_has_progress_by_the_bytes_that_are_read_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, folder, now = tmp_path / "all.txt.gz", Folder(str(tmp_path / "prepared")), [50.0]
    with gzip.open(path, "wb") as file:
        for number in range(40_000):
            file.write(f"line {number} {number**5} {number**7}\n".encode())
    size = path.stat().st_size
    packed = File(str(path), "all.txt.gz", size)
    parts = [part(1, 500_000), Part(2, (Slice(packed, 0, None, size),), None)]
    (folder / progress.MARKS).put(progress.mark_name(2), f"{size}")  # an earlier pass has read it
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(streams, "PIECE_BYTES", 1 << 16)
    meter, reader = ProgressMeter.for_parts((folder, parts)), LineReader((Column("text", "data.column"),))
    total = f"{(size + 500_000) / 1e6:.0f} MB"
    assert meter.read() == f"0/2 parts, 0 MB of {total} read"
    items, seen = progress.read_items_with_mark(folder, reader, parts[1]), list[int]()
    for _ in range(8):
        for _ in range(4_000):
            next(items)
        now[0] += 10.0
        next(items), next(items)
        line = meter.read()
        seen.append(meter.done)
    assert seen == sorted(seen)
    assert len({*seen}) > 4
    assert seen[0] > 0
    assert seen[-1] <= size
    assert f" of {total} read, " in line
    assert line.endswith(" s left")
    (folder / "sections").put_json("00002-0000.json", {})
    (folder / "parts").put_json("00002.json", {})
    assert meter.read().startswith(f"1/2 parts, {size / 1e6:.0f} MB of {total} read, 1 shards of packed files")
    assert meter.done == size
    items.close()
    assert position_in_file(packed) is None


def test_the_tail_of_a_packed_file_counts_from_where_it_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, folder, lines = (
        tmp_path / "all.txt.gz",
        Folder(str(tmp_path / "prepared")),
        [b"%d\n" % n**9 for n in range(99_999)],
    )
    path.write_bytes(gzip.compress(b"".join(lines)))
    size, reader = path.stat().st_size, LineReader((Column("text", "data.column"),))
    tail = Slice(File(str(path), "all.txt.gz", size), sum(map(len, lines[:90_000])), None, size // 10)
    now = [50.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(streams, "PIECE_BYTES", 1 << 12)
    items = progress.read_items_with_mark(folder, reader, Part(3, (tail,), "validation"))
    seen = []
    for count in (2, 9_000):
        for _ in range(count):
            next(items)
        now[0] += 10.0
        next(items), next(items)
        seen.append(int((folder / progress.MARKS).read(progress.mark_name(3))))
    assert 0 <= seen[0] < size // 100
    assert size // 12 < seen[1] <= size // 10


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
