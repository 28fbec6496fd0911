"""A source that grows: files that are added to its folder are prepared as they come, for trainings that follow it.

The files that are there at a look and have not changed since the look before are a batch. It is written down before it is
prepared, so that an interrupted preparation cuts the same parts from the same files; what is published is not read again,
and may go. What is added to a file once its batch has begun is not read.

    follow_source(config, storage, task, on_ray=False, echo=print)     # until the process ends
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

from raystride.pipelines.config import Config
from raystride.pipelines.files import Folder
from raystride.pipelines.prepare.fingerprint import find_fingerprint, open_sources
from raystride.pipelines.prepare.learning import Echo
from raystride.pipelines.prepare.one_source import Divided, job_of, look_at, manifest_of, publisher_of, run
from raystride.pipelines.prepare.parts import divide
from raystride.pipelines.sources.faults import DataError, NoFiles
from raystride.pipelines.sources.pieces import File, Part
from raystride.pipelines.tasks.task import Task

FILE, SEGMENTS = "followed.json", "followed"
"""What an earlier version wrote, all batches in one; and the folder of those since."""
MERGED = 100
"""Batches in a file, once there are as many."""
LOOK_S = 2.0
"""Between two looks at the source."""


def follow_source(
    config: Config, storage: Folder, task: Task, *, fingerprint: str | None = None, on_ray: bool, echo: Echo
) -> NoReturn:
    """Prepares what is in the source, and what is added to it, for ever; `fingerprint`: that of the preparation, if known.

    Raises DataError, SettingError.
    """
    source, validation = open_sources(config, task)
    look_at(config, source, validation)
    said = [*source.describe()]
    for line in said:
        echo(f"data: {line}")
    digest = fingerprint or find_fingerprint(config, task, source, validation, storage=storage)
    followed = Followed(storage / ".prepared" / digest)
    if not followed.known and not source.files:
        message = f"data.source {config.data.source!r} has no files to begin with: put some there"
        raise NoFiles(message, file=config.data.source, settings=("data.source",))
    begun = followed.parts(0) is not None  # then its tokenizers are there, and its files need not be
    first = source if begun else replace(source, files=followed.next(0, source.files, settle=False))
    parts = () if begun else divide(first, validation, config.data)
    job = job_of(config, followed.folder, Divided(first, validation, parts), task, None, on_ray, echo)
    publisher = publisher_of(config, job, partial(manifest_of, config, digest, source, job.task), echo)
    records = followed.folder / "parts"
    recorded = set(records.names())
    number, before = 0, 0
    while True:
        known = followed.parts(number)
        if known is not None and publisher.published >= before + known:
            publisher.skip(known)
            _forget(records, [name for part in range(before, before + known) if (name := f"{part:05d}.json") in recorded])
        elif files := followed.next(number, source.files):
            own = replace(source, files=files)
            parts = (
                _later(divide(own, None, config.data), config, before) if number else divide(own, validation, config.data)
            )
            followed.cut(number, len(parts))
            with publisher.publishing(parts):
                run(job, parts, on_ray, echo)
            known = len(parts)
            if publisher.published >= before + known:
                _forget(records, [f"{part.number:05d}.json" for part in parts])
            echo(f"data: {len(files)} files of {config.data.source} are prepared, {before + known} parts in all")
            if not publisher.begun:
                echo("data: that is not a sample of each split yet: training begins when more files have come")
        else:
            time.sleep(LOOK_S)
            try:
                source, _ = open_sources(config, task)
                for line in source.notes:
                    if line not in said:
                        said.append(line)
                        echo(f"data: {line}")
            except NoFiles:  # what was published has gone
                source = replace(source, files=())
            continue
        number, before = number + 1, before + known


def _forget(records: Folder, names: Sequence[str]) -> None:
    """Removes records of parts that are published: whoever lists the others has fewer to look at."""
    for name in names:
        records.remove(name)


def _later(parts: Sequence[Part], config: Config, before: int) -> tuple[Part, ...]:
    """The parts of a later batch; with a source of its own that validates, none of them does."""
    split = "train" if config.data.validation == "source" else None
    return tuple(replace(part, number=part.number + before, split=split) for part in parts)


class Followed:
    """Which files came with which batch, as the prepared folder remembers it.

    Each batch is a small file; each hundred of them become one, so that a batch costs no more when there were many before.
    """

    def __init__(self, folder: Folder) -> None:
        self.folder, self._segments = folder, folder / SEGMENTS
        self._batches = _read_batches(folder)
        self._known = {uri for batch in self._batches for uri, _ in batch["files"]}
        self._seen: dict[str, File] = {}

    @property
    def known(self) -> bool:
        """Whether there is a batch."""
        return bool(self._batches)

    def parts(self, number: int) -> int | None:
        """Into how many parts a batch was cut; None where it was not."""
        return self._batches[number]["parts"] if number < len(self._batches) else None

    def next(self, number: int, files: Sequence[File], *, settle: bool = True) -> tuple[File, ...]:
        """The files of a batch, of an interrupted preparation or of what has come and has settled; maybe none.

        Raises DataError where one of them is not to be had any more.
        """
        if number == len(self._batches):
            new = [file for file in files if self._known.isdisjoint((file.uri, *file.others))]
            settled = [file for file in new if self._seen.get(file.uri) == file or not settle]
            self._seen = {file.uri: file for file in new}
            if not settled:
                return ()
            self._batches.append({"files": [[file.uri, file.size] for file in settled], "parts": None})
            self._known.update(file.uri for file in settled)
            self._save(number)
        there = {uri: file for file in files for uri in (*file.others, file.uri)}
        for uri, size in self._batches[number]["files"]:
            if uri not in there or there[uri].size < size:
                message = f"{uri} has gone or become shorter since it was found: put it back, or prepare anew"
                raise DataError(message, file=uri)
        return tuple(replace(there[uri], size=size) for uri, size in self._batches[number]["files"])

    def cut(self, number: int, parts: int) -> None:
        """Remembers into how many parts a batch is cut. Raises DataError where it was cut into others before."""
        before = self.parts(number)
        if before not in (None, parts):
            raise DataError(f"batch {number} of {self.folder} makes {parts} parts now, not {before}: its files have changed")
        self._batches[number]["parts"] = parts
        self._save(number)

    def _save(self, number: int) -> None:
        """Writes a batch; with the last of a hundred that is cut, all of them as one file."""
        self._segments.put_json(_segment(number, number), {"batches": self._batches[number : number + 1]})
        first = number - number % MERGED
        if number - first < MERGED - 1 or self._batches[number]["parts"] is None:
            return
        self._segments.put_json(_segment(first, number), {"batches": self._batches[first : number + 1]})
        for each in range(first, number + 1):
            self._segments.remove(_segment(each, each))


def _segment(first: int, last: int) -> str:
    return f"{first:08d}-{last:08d}.json"


def _read_batches(folder: Folder) -> list[dict[str, Any]]:
    """All batches: of an earlier version, which wrote them as one file, and those since."""
    try:
        found: dict[int, dict[str, Any]] = dict(enumerate(folder.read_json(FILE)["batches"]))
    except FileNotFoundError:
        found = {}
    # Those of a hundred come before the single ones that they were made of, of which some may still be there.
    for name in sorted((folder / SEGMENTS).names()):
        first, last = map(int, name.removesuffix(".json").split("-"))
        if first < last or first not in found or found[first]["parts"] is None:
            found |= dict(enumerate((folder / SEGMENTS).read_json(name)["batches"], first))
    return [found[number] for number in range(len(found))]
