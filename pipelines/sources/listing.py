"""The files that a path, glob, folder or URI stands for, in the order of their names, with their sizes and times.

Local folders are walked here, whoever asks: a link to a folder is followed unless it leads back to one of its parents, and a
file with several names is listed once. What is not listed though a user may have meant it is said in `Listing.notes`.

list_packed("corpus/**/*.txt").files                      # [File(uri=..., name="a/1.txt", size=..., stamp=...)]
list_packed("s3://bucket/books").files                    # a folder: every file below it, hidden ones left out
list_files("mails.zip").files                             # the files in it
list_files("missing.txt")                                 # DataError
"""

import codecs
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from raystride.pipelines.credentials import stripped
from raystride.pipelines.files import absolute, filesystem
from raystride.pipelines.retries import retried
from raystride.pipelines.sources.archives import is_archive, is_hidden, members, unnamable
from raystride.pipelines.sources.faults import DataError, NoFiles, printable
from raystride.pipelines.sources.pieces import File
from raystride.pipelines.stores import address_of

if TYPE_CHECKING:
    from pyarrow.fs import FileInfo, FileSystem

_PATTERN = re.compile(r"[*?\[]")
_NAMED = 3
"""Names in a note."""


@dataclass
class Listing:
    """Files, and what a user should know of those that are not among them."""

    files: list[File] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """One line each."""


def list_files(place: str, encoding: str = "utf-8") -> Listing:
    """Lists the files at a path, glob, folder or URI, whose text is in that encoding; archives as the files in them.

    Raises DataError if there is none.
    """
    found = list_packed(place, encoding)
    return Listing(unpack(found.files), found.notes)


def list_packed(place: str, encoding: str = "utf-8") -> Listing:
    """Lists the same files, but archives themselves instead of the files in them. Raises DataError if there is none."""
    # By one name: latin1 and latin-1 are the same data, prepared once.
    name, uri = codecs.lookup(encoding).name, absolute(place)
    return _list_remote(place, uri, name) if "://" in uri else _list_local(place, uri, name)


def unpack(found: list[File]) -> list[File]:
    """Returns the files, with those in archives in place of the archives. Raises DataError if one cannot be unpacked."""
    if any(is_archive(file.name) for file in found):
        left_out = {other for file in once([file for file in found if is_archive(file.name)])[0] for other in file.others}
        found = [file for file in found if file.uri not in left_out]
        found = [member for file in found for member in _unpack_one(file, alone=len(found) == 1)]
    return found


def _unpack_one(file: File, *, alone: bool) -> list[File]:
    """The files in an archive, below its name if other files lie beside it; else the file."""
    if not is_archive(file.name) or unnamable(file):  # the latter is refused, or skipped, as it is read
        return [file]
    inside = members(file)
    return inside if alone else [replace(member, name=f"{file.name}/{member.name}") for member in inside]


def place_exists(place: str) -> bool:
    """Whether a path or URI, or a glob, can be meant: it exists or looks like nothing else."""
    if "://" in place or _PATTERN.search(place):
        return True
    return os.path.lexists(absolute(place))


Key = tuple[int, int]
"""Device and inode."""


@dataclass
class _Walk:
    """What lies below a local folder."""

    files: list[File] = field(default_factory=list)
    again: list[str] = field(default_factory=list)
    """Links to folders that are walked under another name, or lead back to their parents."""
    broken: list[str] = field(default_factory=list)
    """Links that lead nowhere."""


def _list_local(place: str, path: str, encoding: str) -> Listing:
    status = _status(path)
    if status is None:
        if _PATTERN.search(path):
            return _match_local(place, path, encoding)
        what = f"a link to {printable(os.readlink(path))}, which" if os.path.islink(path) else printable(path)
        raise _no_files(place, f"does not exist ({what}): name a file, a folder, a glob or a URI that does")
    if stat.S_ISREG(status.st_mode):
        return Listing([_local_file(os.path.dirname(path), os.path.basename(path), status, encoding)])
    if not stat.S_ISDIR(status.st_mode):
        raise _no_files(place, "is a pipe or a device, which is read once at most: save it as a file, and name that")
    listing = _as_listing(_walk(path, encoding, once=True))
    if not listing.files:
        said = f" ({'; '.join(listing.notes)})" if listing.notes else ""
        raise _no_files(place, f"is a folder without files{said}: put the data there, or name another place")
    return listing


def _match_local(place: str, pattern: str, encoding: str) -> Listing:
    base, rest = _split_pattern(pattern)
    wanted = re.compile(_regex(rest), re.DOTALL)
    status, walk = _status(base), _Walk()
    if status is not None and stat.S_ISDIR(status.st_mode):
        depth = None if "**" in rest else rest.count("/")
        walk = _walk(base, encoding, once=False, depth=depth, hidden=_hidden_unless_named(rest))
    walk.files = [found for found in walk.files if wanted.fullmatch(found.name)]
    walk.broken = [name for name in walk.broken if wanted.fullmatch(name)]
    listing = _as_listing(walk)
    if not listing.files:
        raise _no_match(place, listing.notes)
    return listing


def _status(path: str) -> os.stat_result | None:
    """Returns a path's status, links followed; None if it leads nowhere. Raises DataError if that cannot be told."""
    try:
        return retried(lambda: os.stat(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if os.path.islink(path):  # in a circle
            return None
        raise _unlistable(path, error) from error


def _walk(
    base: str, encoding: str, *, once: bool, depth: int | None = None, hidden: Callable[[str], bool] = is_hidden
) -> _Walk:
    """Walks a local folder, `depth` folders deep at most. No link is followed to one of its parents.

    `once`: each folder is walked under one name, its own if it lies here. Raises DataError if a folder cannot be listed.
    """
    walk, parents = _Walk(), _parents(base)
    walked = {parents[-1]}
    folders: list[tuple[str, tuple[Key, ...], bool]] = [("", parents, False)]
    links: list[tuple[str, tuple[Key, ...], bool]] = []
    while folders or links:
        if not folders:  # all that lie here are walked
            links.sort(reverse=True)
            prefix, parents, linked = links.pop()
            if once and parents[-1] in walked:
                walk.again.append(prefix[:-1])
                continue
            walked.add(parents[-1])
        else:
            prefix, parents, linked = folders.pop()
        for entry in _entries(f"{base}/{prefix}"):
            if hidden(entry.name):
                continue
            name, link = prefix + entry.name, entry.is_symlink()
            try:
                status = entry.stat()
            except PermissionError as error:
                raise _unlistable(f"{base}/{name}", error) from error
            except OSError:  # the link leads nowhere, or in a circle; what is no link has gone since
                if link:
                    walk.broken.append(name)
                continue
            key = status.st_dev, status.st_ino
            if stat.S_ISREG(status.st_mode):
                walk.files.append(_local_file(base, name, status, encoding, linked or link))
            elif stat.S_ISDIR(status.st_mode) and key in parents:
                walk.again.append(name)
            elif stat.S_ISDIR(status.st_mode) and (depth is None or name.count("/") < depth):
                if not link:
                    walked.add(key)
                (links if link else folders).append((f"{name}/", (*parents, key), linked or link))
    walk.files.sort(key=lambda found: found.name)
    return walk


def _parents(path: str) -> tuple[Key, ...]:
    """The folders in which a folder lies, and itself, last."""
    real = os.path.realpath(path)
    parts = real.split("/")
    found = [os.stat("/".join(parts[:count]) or "/") for count in range(1, len(parts) + 1)]
    return tuple((status.st_dev, status.st_ino) for status in found)


def _entries(folder: str) -> Iterator[os.DirEntry[str]]:
    try:
        with retried(lambda: os.scandir(folder)) as entries:
            yield from entries
    except FileNotFoundError:  # it has gone since
        return
    except OSError as error:
        raise _unlistable(folder, error) from error


def _as_listing(walk: _Walk) -> Listing:
    again = note("a link to a folder that is read already", walk.again)
    return Listing(walk.files, [*again, *note("a link that leads nowhere", walk.broken)])


def once(files: Sequence[File]) -> tuple[list[File], list[str]]:
    """Returns the files, those with several names under the first that no link leads to, else the first; and a line that
    names what is left out.
    """
    names: dict[tuple[object, ...], list[File]] = {}
    for file in sorted(files, key=lambda file: file.linked):
        if file.inode:  # some file systems give an inode twice
            names.setdefault((file.inode, file.size, file.stamp), []).append(file)
    several = {some[0].uri: some[1:] for some in names.values() if len(some) > 1}
    if not several:
        return list(files), []
    again = sorted((file for others in several.values() for file in others), key=lambda file: file.name)
    left_out = {file.uri for file in again}
    kept = [
        replace(file, others=tuple(other.uri for other in several[file.uri])) if file.uri in several else file
        for file in files
        if file.uri not in left_out
    ]
    return kept, note("another name of a file that is read", [file.name for file in again])


def note(what: str, names: Sequence[str]) -> list[str]:
    """Returns a line that names what is left out, the first of many, and says what each of them is; none for no name."""
    named = ", ".join(printable(name) for name in names[:_NAMED])
    more = f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
    return [f"left out {named}{more}: {'each ' * (len(names) > 1)}{what}"] if names else []


def _hidden_unless_named(pattern: str) -> Callable[[str], bool]:
    """The same for a glob: a part of it that begins with a dot means hidden names, as in a shell."""
    dots, lines = (any(part.startswith(first) for part in pattern.split("/")) for first in "._")
    return lambda name: is_hidden(name) and not (dots if name[0] == "." else lines)


def _list_remote(place: str, uri: str, encoding: str) -> Listing:
    system, path = _reach(uri)
    info = retried(lambda: system.get_file_info(path))
    kind = info.type.name
    if kind == "File":
        return Listing([_remote_file(info, uri, os.path.dirname(path), encoding)])
    if kind == "Directory":
        files = [_remote_file(found, uri, path, encoding) for found in _below(system, path, recursive=True)]
        if not files:
            raise _no_files(place, "is a folder without files: put the data there, or name another place")
        return Listing(files)
    if _PATTERN.search(path):
        base, rest = _split_pattern(path)
        wanted = re.compile(_regex(rest), re.DOTALL)
        found = _below(system, base, recursive="/" in rest or "**" in rest, hidden=_hidden_unless_named(rest))
        matching = [info for info in found if wanted.fullmatch(os.path.relpath(info.path, base))]
        if not matching:
            raise _no_match(place, ())
        return Listing([_remote_file(info, uri, base, encoding) for info in matching])
    raise _no_files(place, f"does not exist ({uri}): name a file, a folder, a glob or a URI that does")


def _reach(uri: str) -> "tuple[FileSystem, str]":
    try:
        return filesystem(uri)
    except (ValueError, ImportError, OSError) as error:
        message = f"data.source {uri!r} cannot be reached: {error}"
        raise DataError(message, file=uri, settings=("data.source",)) from error


def _below(
    system: "FileSystem", path: str, *, recursive: bool, hidden: Callable[[str], bool] = is_hidden
) -> "list[FileInfo]":
    from pyarrow.fs import FileSelector

    found = retried(lambda: system.get_file_info(FileSelector(path, allow_not_found=True, recursive=recursive)))
    shown = [info for info in found if not any(map(hidden, os.path.relpath(info.path, path).split("/")))]
    return sorted((info for info in shown if info.type.name == "File"), key=lambda info: str(info.path))


def _split_pattern(pattern: str) -> tuple[str, str]:
    """The folder in front of a glob's first wildcard, and the rest."""
    parts = pattern.split("/")
    first = next(i for i, part in enumerate(parts) if _PATTERN.search(part))
    return "/".join(parts[:first]) or "/", "/".join(parts[first:])


def _regex(glob: str) -> str:
    steps = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    tokens = re.findall(r"\*\*/|\*\*|\*|\?|\[[^\]]+\]|.", glob, re.DOTALL)
    return "".join(steps.get(t) or (t.replace("[!", "[^") if t[0] == "[" and len(t) > 1 else re.escape(t)) for t in tokens)


def _local_file(base: str, name: str, status: os.stat_result, encoding: str, linked: bool = False) -> File:
    inode = (status.st_dev, status.st_ino) if status.st_ino else None
    uri = f"{base.rstrip('/')}/{name}"
    return File(uri, name, status.st_size, status.st_mtime_ns, encoding, inode=inode, linked=linked)


def _remote_file(info: "FileInfo", uri: str, base: str, encoding: str) -> File:
    name = os.path.relpath(info.path, base)
    if "://" in info.path:  # a web address: with another key in it, it is the same file
        name = stripped(info.path).rpartition("/")[2]
    return File(address_of(info.path, uri), name, info.size or 0, info.mtime_ns or 0, encoding)


def _no_files(place: str, reason: str) -> NoFiles:
    return NoFiles(f"data.source {place!r} {reason}", file=place, settings=("data.source",))


def _no_match(place: str, notes: Sequence[str]) -> NoFiles:
    said = f" ({'; '.join(notes)})" if notes else ""
    return _no_files(place, f"matches no file{said}: mend the pattern (`**/` stands for any folders)")


def _unlistable(path: str, error: OSError) -> DataError:
    reason = "may not be read (permission denied)" if isinstance(error, PermissionError) else f"cannot be listed: {error}"
    shown = printable(path.rstrip("/"))
    return DataError(
        f"{shown}: {reason}; mend it, or name the files beside it with a glob", file=shown, settings=("data.source",)
    )
