"""The files that a path, glob, folder or URI stands for, in the order of their names, with what fingerprints them.

list_files("corpus/**/*.txt")                             # [File(uri=..., name="a/1.txt", size=..., stamp=...)]
list_files("s3://bucket/books")                           # a folder: every file below it, hidden ones left out
list_files("mails.zip")                                   # the files in it
list_files("missing.txt")                                 # DataError
"""

import codecs
import os
import re
from dataclasses import replace
from typing import TYPE_CHECKING

from raystride.pipelines.credentials import stripped
from raystride.pipelines.files import absolute, filesystem
from raystride.pipelines.retries import retried
from raystride.pipelines.sources.archives import is_archive, members
from raystride.pipelines.sources.faults import DataError, NoFiles
from raystride.pipelines.sources.pieces import File
from raystride.pipelines.stores import address_of

if TYPE_CHECKING:
    from pyarrow.fs import FileInfo, FileSystem


def list_files(place: str, encoding: str = "utf-8") -> list[File]:
    """The files at a path, glob, folder or URI, whose text is in that encoding. Raises DataError where there are none."""
    return unpacked(list_packed(place, encoding))


def list_packed(place: str, encoding: str = "utf-8") -> list[File]:
    """The same, but archives themselves instead of what is in them. Raises DataError where there are none."""
    # By one name: latin1 and latin-1 are the same data, prepared once.
    name = codecs.lookup(encoding).name
    return [replace(file, encoding=name) for file in _list(place)]


def unpacked(found: list[File]) -> list[File]:
    """The files, with those in archives instead of the archives. Raises DataError where one cannot be unpacked."""
    if any(is_archive(file.name) for file in found):
        found = [each for file in found for each in _unpacked(file, alone=len(found) == 1)]
    return found


def _unpacked(file: File, *, alone: bool) -> list[File]:
    """The files in an archive, below its name where it has others beside it; else the file."""
    if not is_archive(file.name):
        return [file]
    inside = members(file)
    return inside if alone else [replace(each, name=f"{file.name}/{each.name}") for each in inside]


def _list(place: str) -> list[File]:
    uri = absolute(place)
    system, path = _reach(uri)
    info = retried(lambda: system.get_file_info(path))
    kind = info.type.name
    if kind == "File":
        return [_file(info, uri, os.path.dirname(path))]
    if kind == "Directory":
        files = [_file(found, uri, path) for found in _below(system, path, recursive=True)]
        if not files:
            message = f"data.source {place!r} is a folder without files: put the data there, or name another place"
            raise NoFiles(message, file=place, settings=("data.source",))
        return files
    if re.search(r"[*?\[]", path):
        return _matching(system, uri, path, place)
    message = f"data.source {place!r} does not exist ({uri}): name a file, a folder, a glob or a URI that does"
    raise NoFiles(message, file=place, settings=("data.source",))


def place_exists(place: str) -> bool:
    """Whether a path or URI, or a glob, can be meant: it exists or looks like nothing else."""
    if "://" in place or re.search(r"[*?\[]", place):
        return True
    return os.path.exists(absolute(place))


def _reach(uri: str) -> "tuple[FileSystem, str]":
    try:
        return filesystem(uri)
    except (ValueError, ImportError, OSError) as error:
        message = f"data.source {uri!r} cannot be reached: {error}"
        raise DataError(message, file=uri, settings=("data.source",)) from error


def _below(system: "FileSystem", path: str, *, recursive: bool) -> "list[FileInfo]":
    from pyarrow.fs import FileSelector

    found = retried(lambda: system.get_file_info(FileSelector(path, allow_not_found=True, recursive=recursive)))
    files = [info for info in found if info.type.name == "File" and not _hidden(info.path, path)]
    return sorted(files, key=lambda info: str(info.path))


def _hidden(path: str, base: str) -> bool:
    parts = os.path.relpath(path, base).split("/")
    return any(part.startswith(".") or part == "__pycache__" for part in parts)


def _matching(system: "FileSystem", uri: str, pattern: str, place: str) -> list[File]:
    parts = pattern.split("/")
    first = next(i for i, part in enumerate(parts) if re.search(r"[*?\[]", part))
    base, rest = "/".join(parts[:first]) or "/", "/".join(parts[first:])
    wanted = re.compile(_regex(rest))
    found = _below(system, base, recursive="/" in rest or "**" in rest)
    files = [_file(info, uri, base) for info in found if wanted.fullmatch(os.path.relpath(info.path, base))]
    if not files:
        message = f"data.source {place!r} matches no file: mend the pattern (`**/` stands for any folders)"
        raise NoFiles(message, file=place, settings=("data.source",))
    return files


def _regex(glob: str) -> str:
    steps = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    tokens = re.findall(r"\*\*/|\*\*|\*|\?|\[[^\]]+\]|.", glob)
    return "".join(steps.get(t) or (t.replace("[!", "[^") if t[0] == "[" and len(t) > 1 else re.escape(t)) for t in tokens)


def _file(info: "FileInfo", uri: str, base: str) -> File:
    name = os.path.relpath(info.path, base)
    if "://" in info.path:  # a web address: with another key in it, it is the same file
        name = stripped(info.path).rpartition("/")[2]
    return File(address_of(info.path, uri), name, info.size or 0, info.mtime_ns or 0)
