"""Watched source: files that are added to its folder are prepared as they arrive, for trainings that run meanwhile.

Files that are present and have not changed between two polls form a batch. It is recorded before it is prepared, so that an
interrupted preparation cuts the same parts from the same files. Published files are not read again, and may be deleted. Data
that is appended to a file after its batch has begun is not read.

    follow_source(RunContext(config, storage), task, on_ray=False)    # until the process ends
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

from raystride.pipelines.config import DataConfig
from raystride.pipelines.data.prepare.fingerprint import (
    READ_AGAIN,
    READING,
    find_fingerprint,
    open_as_prepared,
)
from raystride.pipelines.data.prepare.one_source import (
    DividedSource,
    build_job,
    build_manifest,
    build_publisher,
    prepare_parts,
)
from raystride.pipelines.data.prepare.opened_sources import check_sources, open_sources
from raystride.pipelines.data.prepare.parts import divide_into_parts
from raystride.pipelines.data.prepare.run_context import RunContext
from raystride.pipelines.data.prepare.sections import SECTIONS
from raystride.pipelines.data.sources.faults import DataError, NoFiles
from raystride.pipelines.data.sources.pieces import File, Part
from raystride.pipelines.data.tasks.task import Task
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.system.storage.sealed import put_sealed, read_sealed

FILE, SEGMENTS = "followed.json", "followed"
"""File of an earlier version, with all batches in one; and the folder with a file a batch."""
BATCHES_PER_SEGMENT = 100
"""Batches that are merged into one file."""
POLL_INTERVAL_S = 2.0
"""Seconds between two listings of the source."""


def follow_source(context: RunContext, task: Task, *, on_ray: bool) -> NoReturn:
    """Prepares the source and files added to it, forever. Raises DataError, SettingError."""
    config, storage, log = context.config, context.storage, context.log
    kept = context.kept.fingerprints.get("")
    open_again = (
        partial(open_as_prepared, config, task, storage / ".prepared" / kept)
        if kept
        else partial(open_sources, config, task)
    )
    source, validation = open_again()
    check_sources(config.data, (source, validation))
    logged_lines = [*source.describe()]
    for line in logged_lines:
        log(f"data: {line}")
    digest = kept or find_fingerprint(config, task, source, validation, storage=storage)
    watched = WatchedSource(storage / ".prepared" / digest)
    if not watched.has_batches and not source.files:
        message = f"data.source {config.data.source!r} has no files to begin with: put some there"
        raise NoFiles(message, file=config.data.source, settings=("data.source",))
    is_resumed = watched.parts(0) is not None  # then its tokenizers exist, and its files may be gone
    first = source if is_resumed else replace(source, files=watched.next_batch(0, source.files, must_be_stable=False))
    parts = () if is_resumed else divide_into_parts(first, validation, config.data)
    job = build_job(context, watched.folder, DividedSource(first, validation, parts), task, None, on_ray)
    publisher = build_publisher(
        config.data, job, partial(build_manifest, config.data, digest, source, validation, job.task), log
    )
    recorded = set((watched.folder / "parts").names())
    number, before = 0, 0
    while True:
        known = watched.parts(number)
        if known is not None and publisher.published >= before + known:
            publisher.skip(known)
            _remove_records(
                watched.folder, [part for part in range(before, before + known) if f"{part:05d}.json" in recorded]
            )
        elif files := watched.next_batch(number, source.files):
            own = replace(source, files=files)
            parts = (
                _later_parts(divide_into_parts(own, None, config.data), config.data, before)
                if number
                else divide_into_parts(own, validation, config.data)
            )
            watched.record_parts(number, len(parts))
            with publisher.publishing(parts):
                prepare_parts(job, parts, on_ray, log)
            known = len(parts)
            if publisher.published >= before + known:
                _remove_records(watched.folder, [part.number for part in parts])
            log(f"data: {len(files)} files of {config.data.source} are prepared, {before + known} parts in all")
            if not publisher.has_generation:
                log("data: that is not a sample of each split yet: training begins when more files have come")
        else:
            time.sleep(POLL_INTERVAL_S)
            try:
                source, _ = open_again()
                for line in source.notes:
                    if line not in logged_lines:
                        logged_lines.append(line)
                        log(f"data: {line}")
            except NoFiles:  # published files have been deleted
                source = replace(source, files=())
            continue
        number, before = number + 1, before + known


def _remove_records(folder: Folder, parts: Sequence[int]) -> None:
    """Removes records of published parts and of their sections, so that listing the others stays fast."""
    for part in parts:
        folder.remove(f"parts/{part:05d}.json")
    published = {f"{part:05d}" for part in parts}
    for name in (folder / SECTIONS).names() if parts else ():
        if name.partition("-")[0] in published:
            (folder / SECTIONS).remove(name)


def _later_parts(parts: Sequence[Part], data: DataConfig, before: int) -> tuple[Part, ...]:
    """Returns the parts of a later batch; with a validation source, none of them validates."""
    split = "train" if data.validation == "source" else None
    return tuple(replace(part, number=part.number + before, split=split) for part in parts)


class WatchedSource:
    """The files of each batch, as recorded in the prepared folder.

    Each batch is a small file, and each hundred of them are merged, so that a batch's cost does not grow with their number.
    """

    def __init__(self, folder: Folder) -> None:
        self.folder, self._segments = folder, folder / SEGMENTS
        self._batches = _read_batches(folder)
        self._known = {uri for batch in self._batches for uri, _ in batch["files"]}
        self._seen: dict[str, File] = {}

    @property
    def has_batches(self) -> bool:
        """Whether there is a batch."""
        return bool(self._batches)

    def parts(self, number: int) -> int | None:
        """Returns the number of parts of a batch; None if it was not divided yet."""
        return self._batches[number]["parts"] if number < len(self._batches) else None

    def next_batch(self, number: int, files: Sequence[File], *, must_be_stable: bool = True) -> tuple[File, ...]:
        """Returns the files of a batch: recorded by an interrupted preparation, or new and stable ones; may be empty.

        Raises DataError if one of them is missing or shorter.
        """
        if number == len(self._batches):
            new = [file for file in files if self._known.isdisjoint((file.uri, *file.others))]
            stable = [file for file in new if self._seen.get(file.uri) == file or not must_be_stable]
            self._seen = {file.uri: file for file in new}
            if not stable:
                return ()
            if not number:
                self.folder.put(READ_AGAIN, f"{READING}\n")
            self._batches.append({"files": [[file.uri, file.size] for file in stable], "parts": None})
            self._known.update(file.uri for file in stable)
            self._save_batch(number)
        by_uri = {uri: file for file in files for uri in (*file.others, file.uri)}
        for uri, size in self._batches[number]["files"]:
            if uri not in by_uri or by_uri[uri].size < size:
                message = f"{uri} has gone or become shorter since it was found: put it back, or prepare anew"
                raise DataError(message, file=uri)
        return tuple(replace(by_uri[uri], size=size) for uri, size in self._batches[number]["files"])

    def record_parts(self, number: int, parts: int) -> None:
        """Records the number of parts of a batch. Raises DataError if it was another number before."""
        before = self.parts(number)
        if before not in (None, parts):
            raise DataError(f"batch {number} of {self.folder} makes {parts} parts now, not {before}: its files have changed")
        self._batches[number]["parts"] = parts
        self._save_batch(number)

    def _save_batch(self, number: int) -> None:
        """Writes a batch; after the last divided batch of a hundred, merges them into one file."""
        put_sealed(self._segments, _segment_name(number, number), {"batches": self._batches[number : number + 1]})
        first = number - number % BATCHES_PER_SEGMENT
        if number - first < BATCHES_PER_SEGMENT - 1 or self._batches[number]["parts"] is None:
            return
        put_sealed(self._segments, _segment_name(first, number), {"batches": self._batches[first : number + 1]})
        for merged in range(first, number + 1):
            self._segments.remove(_segment_name(merged, merged))


def _segment_name(first: int, last: int) -> str:
    return f"{first:08d}-{last:08d}.json"


def _read_batches(folder: Folder) -> list[dict[str, Any]]:
    """Returns all batches: those of an earlier version, written as one file, and those since."""
    try:
        found: dict[int, dict[str, Any]] = dict(enumerate(read_sealed(folder, FILE)["batches"]))
    except FileNotFoundError:
        found = {}
    # Merged files sort before the single ones that they were made from, some of which may still exist.
    for name in sorted((folder / SEGMENTS).names()):
        first, last = map(int, name.removesuffix(".json").split("-"))
        if first < last or first not in found or found[first]["parts"] is None:
            found |= dict(enumerate(read_sealed(folder / SEGMENTS, name)["batches"], first))
    return [found[number] for number in range(len(found))]
