"""What can be told of a source before any of it is prepared: by samples of its texts, and by the first rows of its tables.

A file of many gigabytes in another encoding, or a table without the column, is refused within a second or two, and of many
files all that are wrong at once. What lies deeper is found by reading.

    check_source(source)                                      # DataError: 3 of 160 files cannot be read: ...
"""

import codecs
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from raystride.pipelines.sources.archives import foreign, unnamable
from raystride.pipelines.sources.faults import DataError, Fault, Faulty, not_utf8
from raystride.pipelines.sources.pieces import File
from raystride.pipelines.sources.source import Source, first_fault
from raystride.pipelines.sources.streams import open_range

BUDGET = 128 << 20
"""Bytes that are looked at in all, as far as there are not too many files."""
LEAST, MOST, WINDOW = 4 << 10, 2 << 20, 64 << 10
"""Bytes that are looked at of a file, in windows."""
REMOTE = 256
"""Files that are looked at where each asks a server."""
NAMED = 3
AT_ONCE = 16
NEWLINE = b"\n"
LARGE_ARRAY = 32 << 20
"""A larger JSON array, which can only be read as a whole, is not looked at."""


def check_source(source: Source) -> None:
    """Raises DataError for all files together that are seen to be unreadable. A registered source is not run."""
    files = [*source.files, *source.targets]
    if source.kind == "registered":
        return
    remote = sum("://" in file.uri for file in files)
    if remote > REMOTE:
        files = files[:: -(-len(files) // REMOTE)]
    if len(files) > 1 and source.kind != "folders" and not any(file.size for file in files):
        raise DataError(f"all of {len(files):,} files are empty, the first {files[0].uri}: name others", file=files[0].uri)
    share = min(max(BUDGET // max(len(files), 1), LEAST), MOST)
    targets = {file.uri for file in source.targets}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        looked = pool.map(lambda file: _look(source, file, share, rows=file.uri not in targets), files)
        faults = [fault for fault in looked if fault]
    if len(faults) == 1:
        raise faults[0].error()
    if faults:
        named = "".join(f"\n  {fault.place}: {fault.reason}" for fault in faults[:NAMED])
        more = f"\n  and {len(faults) - NAMED:,} more" if len(faults) > NAMED else ""
        raise DataError(f"{len(faults):,} of {len(files):,} files cannot be read: {faults[0].remedy}{named}{more}")


def _look(source: Source, file: File, share: int, *, rows: bool) -> Fault | None:
    """What is wrong with a file, as far as a look tells."""
    try:
        fault = None
        if source.kind in ("text", "python", "lines", "labelled", "parallel", "json") or _is_folder_of_texts(source, file):
            fault = _sampled(file, share, in_lines=source.kind in ("lines", "labelled", "json"))
            if fault and file.size == 0 and may_be_empty(source, file):
                fault = None
        if (
            fault is None
            and rows
            and source.kind in ("lines", "labelled", "json", "csv", "parquet", "huggingface", "webdataset")
        ):
            fault = _first_rows(source, file)
        return fault
    except Faulty as faulty:
        return faulty.fault


def may_be_empty(source: Source, file: File) -> bool:
    """Returns whether a file of no bytes is no fault: it has no rows and others lie beside it, or it is kept as a row."""
    if source.kind in ("text", "python"):  # in which each file is a document
        return False
    return bool(getattr(source.reader, "keep", False)) if source.kind == "folders" else not file.alone


def _is_folder_of_texts(source: Source, file: File) -> bool:
    return (
        source.kind == "folders"
        and not foreign(file)
        and not any(column.kind == "image" for column in getattr(source.reader, "columns", ()))
    )


def _first_rows(source: Source, file: File) -> Fault | None:
    if source.kind == "json" and file.name.lower().endswith(".json") and file.size > LARGE_ARRAY:
        return None
    return first_fault(source.reader, source.kind, file)


def _sampled(file: File, share: int, *, in_lines: bool) -> Fault | None:
    """What is wrong with samples of a text: its beginning, its end, and windows between."""
    if fault := unnamable(file):
        return fault
    if file.size == 0:
        return Fault(file.uri, "is empty")
    for start, data, ends in _windows(file, share):
        if file.encoding == "utf-8" and (error := _not_utf8(start, data, ends)):
            line = f", line {data[: error[0]].count(NEWLINE) + 1}" if in_lines and start == 0 else ""
            return foreign(file, data) or not_utf8(f"{file.uri}{line}", error[1], start + error[0] - error[1].start)
    return None


def _windows(file: File, share: int) -> Iterator[tuple[int, bytes, bool]]:
    """Stretches of the text: where they begin, their bytes, and whether the file ends with them."""
    if file.streamed:
        with open_range(file) as stream:
            yield 0, stream.read(min(share, WINDOW)), False
        return
    if file.size <= share:
        with open_range(file) as stream:
            yield 0, stream.read(file.size), True
        return
    count = max(2, share // WINDOW)
    size = min(WINDOW, share // count)
    for number in range(count):
        start = (file.size - size) * number // (count - 1)
        with open_range(file, start, start + size) as stream:
            yield start, stream.read(size), start + size == file.size


def _not_utf8(start: int, data: bytes, ends: bool) -> tuple[int, UnicodeDecodeError] | None:
    """Where the bytes of a window are no text, and why."""
    # A window may begin inside a character, of which up to three bytes are left.
    skipped = 0
    while start and skipped < min(3, len(data)) and data[skipped] & 0xC0 == 0x80:
        skipped += 1
    try:
        codecs.getincrementaldecoder("utf-8")().decode(data[skipped:], ends)
    except UnicodeDecodeError as error:
        return skipped + error.start, error
    return None
