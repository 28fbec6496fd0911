"""Checks a source before preparation, by samples of its texts and the first rows of its tables.

A file of many gigabytes in another encoding, or a table without the column, is refused within a second or two, and all
faulty files are reported together. Deeper faults are found when the data is read.

    check_source(source)                                      # DataError: 3 of 160 files cannot be read: ...
"""

import codecs
from collections.abc import Callable, Iterator

from raystride.pipelines.data.sources.archives import invalid_name_fault, unsupported_format_fault
from raystride.pipelines.data.sources.faults import DataError, Fault, FaultError, not_utf8_fault
from raystride.pipelines.data.sources.pieces import File
from raystride.pipelines.data.sources.source import Source, first_fault
from raystride.pipelines.data.sources.streams import open_range
from raystride.pipelines.system.threads import map_in_threads

BUDGET_BYTES = 128 << 20
"""Total bytes to sample, unless MIN_SHARE_BYTES of each file are more."""
MIN_SHARE_BYTES, MAX_SHARE_BYTES, WINDOW_BYTES = 4 << 10, 2 << 20, 64 << 10
"""Bytes to sample of a file, and bytes of a sample window."""
MAX_REMOTE_FILES, MAX_LOCAL_FILES = 256, 10_000
"""Files to check: of a source with more remote ones, each of which needs requests to a server, and of others."""
MAX_NAMED_FILES = 3
NUM_THREADS = 16
NEWLINE = b"\n"
MAX_ARRAY_BYTES = 32 << 20
"""A larger JSON array is not checked, since it can only be read as a whole."""


def check_source(source: Source, count_file: Callable[[], object] = lambda: None) -> None:
    """Raises one DataError for all files that are found to be unreadable, among a sample of many.

    `count_file` is called for each checked file. A registered source is not run.
    """
    files = [*source.files, *source.targets]
    if source.kind == "registered":
        return
    remote = sum("://" in file.uri for file in files)
    files = files[:: -(-len(files) // (MAX_REMOTE_FILES if remote > MAX_REMOTE_FILES else MAX_LOCAL_FILES)) or 1]
    if len(files) > 1 and source.kind != "folders" and not any(file.size for file in files):
        raise DataError(f"all of {len(files):,} files are empty, the first {files[0].uri}: name others", file=files[0].uri)
    share = min(max(BUDGET_BYTES // max(len(files), 1), MIN_SHARE_BYTES), MAX_SHARE_BYTES)
    targets = {file.uri for file in source.targets}
    faults = []
    for fault in map_in_threads(
        lambda file: _check_file(source, file, share, rows=file.uri not in targets), files, NUM_THREADS
    ):
        count_file()
        if fault:
            faults.append(fault)
    if len(faults) == 1:
        raise faults[0].error()
    if faults:
        named = "".join(f"\n  {fault.place}: {fault.reason}" for fault in faults[:MAX_NAMED_FILES])
        more = f"\n  and {len(faults) - MAX_NAMED_FILES:,} more" if len(faults) > MAX_NAMED_FILES else ""
        raise DataError(f"{len(faults):,} of {len(files):,} files cannot be read: {faults[0].remedy}{named}{more}")


def _check_file(source: Source, file: File, share: int, *, rows: bool) -> Fault | None:
    """Returns the fault of a file that its samples or first rows show; None if there is none."""
    try:
        fault = None
        if source.kind in ("text", "python", "lines", "labelled", "parallel", "json") or _is_folder_of_texts(source, file):
            fault = _check_samples(file, share, in_lines=source.kind in ("lines", "labelled", "json"))
            if fault and file.size == 0 and may_be_empty(source, file):
                fault = None
        if (
            fault is None
            and rows
            and source.kind in ("lines", "labelled", "json", "csv", "parquet", "huggingface", "webdataset")
        ):
            fault = _check_first_rows(source, file)
        return fault
    except FaultError as faulty:
        return faulty.fault


def may_be_empty(source: Source, file: File) -> bool:
    """Returns whether an empty file is no fault: it has no rows and the source has other files, or it is kept as a row."""
    if source.kind in ("text", "python"):  # each file is a document
        return False
    return bool(getattr(source.reader, "keep", False)) if source.kind == "folders" else not file.is_whole_source


def _is_folder_of_texts(source: Source, file: File) -> bool:
    return (
        source.kind == "folders"
        and not unsupported_format_fault(file)
        and not any(column.kind == "image" for column in getattr(source.reader, "columns", ()))
    )


def _check_first_rows(source: Source, file: File) -> Fault | None:
    if source.kind == "json" and file.name.lower().endswith(".json") and file.size > MAX_ARRAY_BYTES:
        return None
    return first_fault(source.reader, source.kind, file)


def _check_samples(file: File, share: int, *, in_lines: bool) -> Fault | None:
    """Returns the fault of a text file, by samples from its beginning, its end, and between; None if there is none."""
    if fault := invalid_name_fault(file):
        return fault
    if file.size == 0:
        return Fault(file.uri, "is empty")
    for start, data, ends in _sample_windows(file, share):
        if file.encoding == "utf-8" and (error := _find_invalid_utf8(start, data, ends)):
            line = f", line {data[: error[0]].count(NEWLINE) + 1}" if in_lines and start == 0 else ""
            return not_utf8_fault(f"{file.uri}{line}", error[1], start + error[0] - error[1].start)
    return None


def _sample_windows(file: File, share: int) -> Iterator[tuple[int, bytes, bool]]:
    """Yields sample windows of a text: their offset, their bytes, and whether they end the file."""
    if file.is_streamed:
        with open_range(file) as stream:
            yield 0, stream.read(min(share, WINDOW_BYTES)), False
        return
    if file.size <= share:
        with open_range(file) as stream:
            yield 0, stream.read(file.size), True
        return
    count = max(2, share // WINDOW_BYTES)
    size = min(WINDOW_BYTES, share // count)
    for number in range(count):
        start = (file.size - size) * number // (count - 1)
        with open_range(file, start, start + size) as stream:
            yield start, stream.read(size), start + size == file.size


def _find_invalid_utf8(start: int, data: bytes, ends: bool) -> tuple[int, UnicodeDecodeError] | None:
    """Returns the offset of the first invalid byte in a window, and the error; None if it is valid UTF-8."""
    # A window may begin inside a character, with up to three bytes left of it.
    skipped = 0
    while start and skipped < min(3, len(data)) and data[skipped] & 0xC0 == 0x80:
        skipped += 1
    try:
        codecs.getincrementaldecoder("utf-8")().decode(data[skipped:], ends)
    except UnicodeDecodeError as error:
        return skipped + error.start, error
    return None
