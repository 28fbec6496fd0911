"""Lists the files of a path, glob, folder or URI, sorted by name, with sizes and modification times.

In local folders, links to folders are followed unless they lead back to a parent, and a file with several names is listed
once. `Listing.notes` names files that were left out though a user may have expected them.

list_without_unpacking("corpus/**/*.txt").files           # [File(uri=..., name="a/1.txt", size=..., stamp=...)]
list_without_unpacking("s3://bucket/books").files         # a folder: all files below it, without hidden ones
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

from raystride.pipelines.data.sources.archives import invalid_name_fault, is_archive, is_hidden, list_members
from raystride.pipelines.data.sources.faults import DataError, NoFiles, escape_surrogates
from raystride.pipelines.data.sources.pieces import File
from raystride.pipelines.system.credentials import strip_credentials
from raystride.pipelines.system.storage.folder import absolute_uri, resolve_filesystem
from raystride.pipelines.system.storage.object_stores import address_of
from raystride.pipelines.system.storage.retries import retry

if TYPE_CHECKING:
    from pyarrow.fs import FileInfo, FileSystem

WILDCARD = re.compile(r"[*?\[]")
"""What makes a path a glob."""
_MAX_NAMED = 3
"""The maximal number of names in a note."""


@dataclass
class Listing:
    """Files, and notes for the user about files that were left out."""

    files: list[File] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """One line each."""


def list_files(place: str, encoding: str = "utf-8") -> Listing:
    """Lists the files of a path, glob, folder or URI, with archives replaced by the files in them.

    `encoding` is that of their text. Raises DataError if there is no file.
    """
    found = list_without_unpacking(place, encoding)
    return Listing(expand_archives(found.files), found.notes)


def list_without_unpacking(place: str, encoding: str = "utf-8") -> Listing:
    """Lists the same files, but archives as such. Raises DataError if there is no file."""
    # Normalised: latin1 and latin-1 are the same data, prepared once.
    name, uri = codecs.lookup(encoding).name, absolute_uri(place)
    return _list_remote(place, uri, name) if "://" in uri else _list_local(place, uri, name)


def expand_archives(found: list[File]) -> list[File]:
    """Replaces archives by the files in them. Raises DataError if one cannot be unpacked."""
    if any(is_archive(file.name) for file in found):
        left_out = {
            other
            for file in remove_duplicates([file for file in found if is_archive(file.name)])[0]
            for other in file.others
        }
        found = [file for file in found if file.uri not in left_out]
        found = [member for file in found for member in _expand_archive(file, is_whole_source=len(found) == 1)]
    return found


def _expand_archive(file: File, *, is_whole_source: bool) -> list[File]:
    """Returns the files in an archive, prefixed with its name if the source has other files; else the file."""
    if not is_archive(file.name) or invalid_name_fault(file):  # an invalid name is refused, or skipped, when it is read
        return [file]
    inside = list_members(file)
    return inside if is_whole_source else [replace(member, name=f"{file.name}/{member.name}") for member in inside]


def path_exists(place: str) -> bool:
    """Returns whether a local path exists; True for all URIs and globs."""
    if "://" in place or WILDCARD.search(place):
        return True
    return os.path.lexists(absolute_uri(place))


FileId = tuple[int, int]
"""Device and inode."""


@dataclass
class _WalkResult:
    """The files and left-out links below a local folder."""

    files: list[File] = field(default_factory=list)
    repeated: list[str] = field(default_factory=list)
    """Links to folders that are walked under another name, or lead back to their parents."""
    broken: list[str] = field(default_factory=list)
    """Broken links."""


def _list_local(place: str, path: str, encoding: str) -> Listing:
    status = _stat_path(path)
    if status is None:
        if WILDCARD.search(path):
            return _match_local(place, path, encoding)
        what = (
            f"a link to {escape_surrogates(os.readlink(path))}, which" if os.path.islink(path) else escape_surrogates(path)
        )
        raise _no_files_error(place, f"does not exist ({what}): name a file, a folder, a glob or a URI that does")
    if stat.S_ISREG(status.st_mode):
        folder, name = os.path.split(path)
        return Listing([_local_file(folder, name, status, encoding, is_whole_source=True)])
    if not stat.S_ISDIR(status.st_mode):
        raise _no_files_error(place, "is a pipe or a device, which is read once at most: save it as a file, and name that")
    listing = _to_listing(_walk_folder(path, encoding, unique=True))
    if not listing.files:
        notes_text = f" ({'; '.join(listing.notes)})" if listing.notes else ""
        raise _no_files_error(place, f"is a folder without files{notes_text}: put the data there, or name another place")
    return listing


def _match_local(place: str, pattern: str, encoding: str) -> Listing:
    base, rest = _split_pattern(pattern)
    wanted = re.compile(_glob_to_regex(rest), re.DOTALL)
    status, walk = _stat_path(base), _WalkResult()
    if status is not None and stat.S_ISDIR(status.st_mode):
        depth = None if "**" in rest else rest.count("/")
        walk = _walk_folder(base, encoding, unique=False, depth=depth, hidden=_hidden_filter(rest))
    walk.files = [found for found in walk.files if wanted.fullmatch(found.name)]
    walk.broken = [name for name in walk.broken if wanted.fullmatch(name)]
    listing = _to_listing(walk)
    if not listing.files:
        raise _no_match_error(place, listing.notes)
    return listing


def _stat_path(path: str) -> os.stat_result | None:
    """Returns a path's status, links followed; None if it leads nowhere. Raises DataError if that cannot be told."""
    try:
        return retry(lambda: os.stat(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if os.path.islink(path):  # a circular link
            return None
        raise _unlistable_error(path, error) from error


def _walk_folder(
    base: str, encoding: str, *, unique: bool, depth: int | None = None, hidden: Callable[[str], bool] = is_hidden
) -> _WalkResult:
    """Walks a local folder, at most `depth` folders deep. A link to one of its own parents is not followed.

    `unique`: each folder is walked once, by its own name if possible. Raises DataError if a folder cannot be listed.
    """
    walk, parents = _WalkResult(), _ancestor_ids(base)
    walked = {parents[-1]}
    folders: list[tuple[str, tuple[FileId, ...], bool]] = [("", parents, False)]
    links: list[tuple[str, tuple[FileId, ...], bool]] = []
    while folders or links:
        if not folders:  # all real folders are walked
            links.sort(reverse=True)
            prefix, parents, via_link = links.pop()
            if unique and parents[-1] in walked:
                walk.repeated.append(prefix[:-1])
                continue
            walked.add(parents[-1])
        else:
            prefix, parents, via_link = folders.pop()
        for entry in _scan_folder(f"{base}/{prefix}"):
            if hidden(entry.name):
                continue
            name, link = prefix + entry.name, entry.is_symlink()
            try:
                status = entry.stat()
            except PermissionError as error:
                raise _unlistable_error(f"{base}/{name}", error) from error
            except OSError:  # a broken or circular link, or a file that was deleted since
                if link:
                    walk.broken.append(name)
                continue
            key = status.st_dev, status.st_ino
            if stat.S_ISREG(status.st_mode):
                walk.files.append(_local_file(base, name, status, encoding, via_link or link))
            elif stat.S_ISDIR(status.st_mode) and key in parents:
                walk.repeated.append(name)
            elif stat.S_ISDIR(status.st_mode) and (depth is None or name.count("/") < depth):
                if not link:
                    walked.add(key)
                (links if link else folders).append((f"{name}/", (*parents, key), via_link or link))
    walk.files.sort(key=lambda found: found.name)
    return walk


def _ancestor_ids(path: str) -> tuple[FileId, ...]:
    """Returns device and inode of a folder's parents and of itself, last."""
    real = os.path.realpath(path)
    parts = real.split("/")
    found = [os.stat("/".join(parts[:count]) or "/") for count in range(1, len(parts) + 1)]
    return tuple((status.st_dev, status.st_ino) for status in found)


def _scan_folder(folder: str) -> Iterator[os.DirEntry[str]]:
    try:
        with retry(lambda: os.scandir(folder)) as entries:
            yield from entries
    except FileNotFoundError:  # deleted since
        return
    except OSError as error:
        raise _unlistable_error(folder, error) from error


def _to_listing(walk: _WalkResult) -> Listing:
    repeated = left_out_note("a link to a folder that is read already", walk.repeated)
    return Listing(walk.files, [*repeated, *left_out_note("a link that leads nowhere", walk.broken)])


def remove_duplicates(files: Sequence[File]) -> tuple[list[File], list[str]]:
    """Removes repeated names of the same file; returns the files, and a note about the others.

    A file keeps its first name that is not via a link, else its first name.
    """
    names: dict[tuple[object, ...], list[File]] = {}
    for file in sorted(files, key=lambda file: file.via_link):
        if file.inode:  # some file systems give an inode twice
            names.setdefault((file.inode, file.size, file.stamp), []).append(file)
    several = {some[0].uri: some[1:] for some in names.values() if len(some) > 1}
    if not several:
        return list(files), []
    repeated = sorted((file for others in several.values() for file in others), key=lambda file: file.name)
    left_out = {file.uri for file in repeated}
    kept = [
        replace(file, others=tuple(other.uri for other in several[file.uri])) if file.uri in several else file
        for file in files
        if file.uri not in left_out
    ]
    return kept, left_out_note("another name of a file that is read", [file.name for file in repeated])


def left_out_note(what: str, names: Sequence[str]) -> list[str]:
    """Returns a note with the first names that are left out, and the reason `what`; empty without names."""
    named = ", ".join(escape_surrogates(name) for name in names[:_MAX_NAMED])
    more = f" and {len(names) - _MAX_NAMED:,} more" if len(names) > _MAX_NAMED else ""
    return [f"left out {named}{more}: {'each ' * (len(names) > 1)}{what}"] if names else []


def _hidden_filter(pattern: str) -> Callable[[str], bool]:
    """Returns a filter for hidden names that lets through those that a glob names, as in a shell: by `.` or `_` first."""
    dots, lines = (any(part.startswith(first) for part in pattern.split("/")) for first in "._")
    return lambda name: is_hidden(name) and not (dots if name[0] == "." else lines)


def _list_remote(place: str, uri: str, encoding: str) -> Listing:
    system, path = _open_remote(uri)
    info = retry(lambda: system.get_file_info(path))
    kind = info.type.name
    if kind == "File":
        return Listing([_remote_file(info, uri, os.path.dirname(path), encoding)])
    if kind == "Directory":
        files = [_remote_file(found, uri, path, encoding) for found in _list_below(system, path, recursive=True)]
        if not files:
            raise _no_files_error(place, "is a folder without files: put the data there, or name another place")
        return Listing(files)
    if WILDCARD.search(path):
        base, rest = _split_pattern(path)
        wanted = re.compile(_glob_to_regex(rest), re.DOTALL)
        found = _list_below(system, base, recursive="/" in rest or "**" in rest, hidden=_hidden_filter(rest))
        matching = [info for info in found if wanted.fullmatch(os.path.relpath(info.path, base))]
        if not matching:
            raise _no_match_error(place, ())
        return Listing([_remote_file(info, uri, base, encoding) for info in matching])
    raise _no_files_error(place, f"does not exist ({uri}): name a file, a folder, a glob or a URI that does")


def _open_remote(uri: str) -> "tuple[FileSystem, str]":
    try:
        return resolve_filesystem(uri)
    except (ValueError, ImportError, OSError) as error:
        message = f"data.source {uri!r} cannot be reached: {error}"
        raise DataError(message, file=uri, settings=("data.source",)) from error


def _list_below(
    system: "FileSystem", path: str, *, recursive: bool, hidden: Callable[[str], bool] = is_hidden
) -> "list[FileInfo]":
    from pyarrow.fs import FileSelector

    found = retry(lambda: system.get_file_info(FileSelector(path, allow_not_found=True, recursive=recursive)))
    shown = [info for info in found if not any(map(hidden, os.path.relpath(info.path, path).split("/")))]
    return sorted((info for info in shown if info.type.name == "File"), key=lambda info: str(info.path))


def _split_pattern(pattern: str) -> tuple[str, str]:
    """Splits a glob into the folder before its first wildcard, and the rest."""
    parts = pattern.split("/")
    first = next(i for i, part in enumerate(parts) if WILDCARD.search(part))
    return "/".join(parts[:first]) or "/", "/".join(parts[first:])


def _glob_to_regex(glob: str) -> str:
    steps = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    tokens = re.findall(r"\*\*/|\*\*|\*|\?|\[[^\]]+\]|.", glob, re.DOTALL)
    return "".join(steps.get(t) or (t.replace("[!", "[^") if t[0] == "[" and len(t) > 1 else re.escape(t)) for t in tokens)


def _local_file(
    base: str, name: str, status: os.stat_result, encoding: str, via_link: bool = False, *, is_whole_source: bool = False
) -> File:
    inode = (status.st_dev, status.st_ino) if status.st_ino else None
    uri = f"{base.rstrip('/')}/{name}"
    return File(
        uri,
        name,
        status.st_size,
        status.st_mtime_ns,
        encoding,
        inode=inode,
        via_link=via_link,
        is_whole_source=is_whole_source,
    )


def _remote_file(info: "FileInfo", uri: str, base: str, encoding: str) -> File:
    name = os.path.relpath(info.path, base)
    if "://" in info.path:  # a web address: with another key in it, it is still the same file
        name = strip_credentials(info.path).rpartition("/")[2]
    return File(address_of(info.path, uri), name, info.size or 0, info.mtime_ns or 0, encoding, is_whole_source=False)


def _no_files_error(place: str, reason: str) -> NoFiles:
    return NoFiles(f"data.source {place!r} {reason}", file=place, settings=("data.source",))


def _no_match_error(place: str, notes: Sequence[str]) -> NoFiles:
    notes_text = f" ({'; '.join(notes)})" if notes else ""
    return _no_files_error(place, f"matches no file{notes_text}: mend the pattern (`**/` stands for any folders)")


def _unlistable_error(path: str, error: OSError) -> DataError:
    reason = "may not be read (permission denied)" if isinstance(error, PermissionError) else f"cannot be listed: {error}"
    shown = escape_surrogates(path.rstrip("/"))
    return DataError(
        f"{shown}: {reason}; mend it, or name the files beside it with a glob", file=shown, settings=("data.source",)
    )
