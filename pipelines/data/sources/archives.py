"""Unpacks zip and tar archives on the node that reads them, and lists their members as files.

An archive is refused, with the member's name, if a member leads out of it, is a link, has a password, is broken or is an
archive itself, or if it expands too much. Unpacked archives are in `node_folder("-unpacked")`; unpacking another one removes
those that have not been read for a week.

    list_members(File("/data/mails.zip", "mails.zip", 20_480))     # [File("/.../mails.zip/a.csv", "a.csv", 52_113, ...)]
    ensure_unpacked(file)                                          # unpacks its archive, unless this node has
"""

import errno
import hashlib
import lzma
import os
import re
import shutil
import stat
import tarfile
import time
import uuid
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import IO, Any

from raystride.pipelines.data import first_bytes
from raystride.pipelines.data.sources.faults import REMEDY, DataError, Fault, FaultError, raise_as_faults
from raystride.pipelines.data.sources.pieces import COMPRESSIONS, Archive, File
from raystride.pipelines.system.credentials import redact_uris
from raystride.pipelines.system.node_folder import ensure_private, node_folder
from raystride.pipelines.system.storage.folder import resolve_filesystem
from raystride.pipelines.system.storage.locks import file_lock

TAR_ENDINGS = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tar.zst")
ARCHIVE_ENDINGS = (".zip", *TAR_ENDINGS)
"""Endings of supported archives."""
UNSUPPORTED_ENDINGS = (".7z", ".rar", ".xz", ".lzma", ".tar.lz4", ".xlsx", ".docx", ".pdf")
"""Endings of unsupported containers and document formats, which must never be read as text."""
MAX_EXPANSION, MIN_EXTRACTED_BYTES = 200, 1 << 30
"""An archive may expand to MAX_EXPANSION times its size, and in any case to MIN_EXTRACTED_BYTES: text expands ten times."""
_TABLE = re.compile(r"\.(csv|tsv|jsonl?|ndjson|parquet|pq)(\.(gz|bz2|zst))?$")
_MARKERS = re.compile(r"_SUCCESS|_temporary|_metadata|_common_metadata|_delta_log|_spark_metadata|_(committed|started)_.*")
"""Marker files that Spark, Hadoop and Databricks write beside data."""
MAX_MEMBERS = 5_000_000
SPARE_BYTES = 1 << 30
"""Bytes of the disk that stay free."""
MAX_AGE_S = 7 * 24 * 3600.0
LOCK_TIMEOUT_S = 3600.0
"""Seconds to wait for other processes, which may be unpacking large archives."""

_ARCHIVE_ERRORS = (
    zipfile.BadZipFile,
    tarfile.TarError,
    zlib.error,
    lzma.LZMAError,
    EOFError,
    NotImplementedError,
    RuntimeError,
    ValueError,
)


def list_members(archive: File) -> list[File]:
    """Unpacks an archive; returns its files, sorted by name, without hidden ones. Raises DataError.

    A top folder that contains all of them is dropped from their names, if there are folders below it.
    """
    place = (
        node_folder("-unpacked")
        / hashlib.sha256(f"{redact_uris(archive.uri)} {archive.size} {archive.stamp}".encode()).hexdigest()[:16]
    )
    kept = Archive(archive.uri, archive.size, str(place / os.path.basename(archive.name)))
    _unpack_once(kept)
    found = []
    for folder, _, names in os.walk(kept.folder):
        found += [os.path.relpath(os.path.join(folder, name), kept.folder) for name in names]
    if not found:
        raise DataError(f"{archive.uri}: holds no files: name an archive with data", file=archive.uri)
    tops = {name.partition("/")[0] for name in found}
    drop = len(tops.pop()) + 1 if len(tops) == 1 and any(name.count("/") > 1 for name in found) else 0
    # Sorted like the files of a folder.
    return [_member_file(kept, archive, name, name[drop:]) for name in sorted(found)]


def _member_file(kept: Archive, archive: File, path: str, name: str) -> File:
    uri = f"{kept.folder}/{path}"
    return File(uri, name, os.path.getsize(uri), archive.stamp, archive.encoding, archive=kept)


def is_archive(name: str) -> bool:
    """Returns whether a file of this name is a supported archive."""
    return name.lower().endswith(ARCHIVE_ENDINGS)


def unsupported_format_fault(file: File) -> Fault | None:
    """Returns the fault of a file in an unsupported format, by its name; None if it may be text."""
    what = next((ending for ending in UNSUPPORTED_ENDINGS if file.name.lower().endswith(ending)), None)
    return Fault(file.uri, f"is no text but holds {what.removeprefix('.')}", first_bytes.UNPACK) if what else None


def foreign_format_fault(file: File, head: bytes | None = None, *, expected: str = "") -> Fault | None:
    """Returns the fault of a file that is not `expected`, by default text, but another format by its first bytes.

    Without `head` they are read, as they lie on the disk; None also if they cannot be.
    """
    may_be_page = not _TABLE.search(file.name.lower())
    if head is None:
        head, may_be_page = b"", may_be_page and not file.name.lower().endswith(tuple(COMPRESSIONS))
        with suppress(Exception):
            system, path = resolve_filesystem(file.uri)
            with system.open_input_stream(path, compression=None) as stream:
                head = bytes(stream.read(first_bytes.HEAD_BYTES))
    found = first_bytes.find_foreign_format(head, expected=expected, may_be_page=may_be_page)
    return Fault(file.uri, f"is {found.format}", found.remedy) if found else None


def invalid_name_fault(file: File) -> Fault | None:
    """Returns the fault of a file name that is not UTF-8, since most libraries cannot open it; None if it is UTF-8."""
    try:
        file.uri.encode()
    except UnicodeEncodeError:
        return Fault(file.uri, "has a name that is not UTF-8", f"rename it, {REMEDY}")
    return None


def ensure_unpacked(file: File) -> None:
    """Unpacks the file's archive, unless this node has. Raises FaultError if that fails or the file's name is not UTF-8."""
    if fault := invalid_name_fault(file):
        raise FaultError(fault)
    if file.archive and not os.path.exists(file.uri):
        try:
            _unpack_once(file.archive)
        except DataError as error:
            raise FaultError(Fault(file.archive.uri, str(error))) from error


def _unpack_once(archive: Archive) -> None:
    """Unpacks into the archive's folder, unless it exists: atomically, and one process at a time."""
    folder = Path(archive.folder)
    root = folder.parent.parent
    ensure_private(root)
    refusal = DataError(
        f"{archive.uri}: another process has been unpacking in {root} for {LOCK_TIMEOUT_S / 3600:g} h", file=archive.uri
    )
    with file_lock(root / "lock", LOCK_TIMEOUT_S, refusal):
        if not folder.is_dir():
            _remove_folders(root, time.time() - MAX_AGE_S)
            temporary = folder.parent.with_name(f"{folder.parent.name}.tmp-{uuid.uuid4().hex[:8]}")
            try:
                _extract_members(archive, temporary / folder.name)
                shutil.rmtree(folder.parent, ignore_errors=True)
                temporary.rename(folder.parent)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
        os.utime(folder.parent)  # `list_unread` reads the time of the last use from it


def _remove_folders(root: Path, before: float) -> None:
    """Removes what `list_unread` returns. The lock must be held."""
    for folder in list_unread(root, before):
        shutil.rmtree(folder, ignore_errors=True)


def list_unread(root: Path, before: float) -> list[Path]:
    """Returns unpacked archives that no source was opened from since a time in seconds since 1970, and unfinished ones."""
    found = []
    for folder in root.iterdir() if root.is_dir() else ():
        with suppress(FileNotFoundError):
            if folder.is_dir() and (".tmp-" in folder.name or folder.stat().st_mtime < before):
                found.append(folder)
    return found


def remove_unread(root: Path, before: float) -> None:
    """Removes what `list_unread` returns while nobody unpacks; who still needs a member unpacks again."""
    with file_lock(root / "lock", LOCK_TIMEOUT_S):
        _remove_folders(root, before)


def _extract_members(archive: Archive, folder: Path) -> None:
    folder.mkdir(parents=True)
    free = shutil.disk_usage(folder).free - SPARE_BYTES
    max_bytes, written = max(MIN_EXTRACTED_BYTES, archive.size * MAX_EXPANSION), 0
    try:
        with raise_as_faults(archive.uri):
            system, path = resolve_filesystem(archive.uri)
            source = system.open_input_file(path)
        with source, closing(_open_archive(archive.uri, folder.name, source)) as opened:
            for number, (name, member) in enumerate(_list_entries(archive.uri, opened)):
                if number >= MAX_MEMBERS:
                    raise DataError(
                        f"{archive.uri}: has more than {MAX_MEMBERS:,} members: unpack it yourself", file=archive.uri
                    )
                with (
                    _open_member(archive.uri, name, opened, member) as stream,
                    _open_target(archive.uri, folder, name, opened) as out,
                ):
                    while data := _read_block(archive.uri, name, stream):
                        written += len(data)
                        if written > max_bytes:
                            raise DataError(
                                f"{archive.uri}: grows to more than {MAX_EXPANSION} times its size at {name!r}, as archives "
                                "do that are made to fill a disk: if it is none, unpack it yourself and name the folder",
                                file=archive.uri,
                                member=name,
                            )
                        if written > free:
                            raise DataError(
                                f"{archive.uri}: does not fit on the disk of {folder.parent.parent} unpacked: name another "
                                "place in the environment variable RAYSTRIDE_CACHE, or unpack it yourself",
                                file=archive.uri,
                            )
                        out.write(data)
    except FaultError as faulty:
        raise faulty.fault.error() from faulty


def _open_target(uri: str, folder: Path, name: str, opened: Any) -> IO[bytes]:
    """Opens the target file of a member. Raises DataError for an impossible name, or one that exists already.

    In a tar a later member replaces an earlier one, as `tar --update` appends it.
    """
    target = folder / name
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        return target.open("xb" if isinstance(opened, zipfile.ZipFile) else "wb")
    except FileExistsError as error:
        problem = "is there twice, or is both a file and a folder"
        raise DataError(f"{uri}: member {name!r} {problem}: pack the archive anew", file=uri, member=name) from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES):
            raise
        problem = f"cannot be unpacked: {error.strerror}"
        raise DataError(f"{uri}: member {name!r} {problem}; pack the archive anew", file=uri, member=name) from error


def _open_archive(uri: str, name: str, stream: Any) -> Any:
    """Opens an archive. Raises DataError if it is none, or broken."""
    try:
        if name.lower().endswith(".zst"):
            from pyarrow import CompressedInputStream

            return tarfile.open(fileobj=CompressedInputStream(stream, "zstd"), mode="r|")
        return zipfile.ZipFile(stream) if name.lower().endswith(".zip") else tarfile.open(fileobj=stream, mode="r:*")
    except (*_ARCHIVE_ERRORS, OSError) as error:
        head = b""
        with suppress(OSError):
            stream.seek(0)
            head = bytes(stream.read(first_bytes.HEAD_BYTES))
        if found := first_bytes.find_substitute(head):
            raise DataError(f"{uri}: is {found.format}; {found.remedy}", file=uri) from error
        reason = f"is no archive, or a broken one: {error}"
        raise DataError(f"{uri}: {reason}; mend it, or leave it out with a glob", file=uri) from error


def _list_entries(uri: str, opened: Any) -> Iterator[tuple[str, Any]]:
    """Yields the members that are visible files, with their names. Raises DataError for one that is refused."""
    for name, member, problem in _zip_entries(opened) if isinstance(opened, zipfile.ZipFile) else _tar_entries(uri, opened):
        parts = name.split("/")
        if _has_hidden_part(parts):
            continue
        if name.startswith(("/", "\\")) or ".." in name.replace("\\", "/").split("/") or "\0" in name:
            problem = "leads out of the archive"
        elif "\\" in name:
            problem = "has backslashes in its name"
        elif is_archive(name) or name.lower().endswith((".7z", ".rar")):
            problem = "is an archive in an archive"
        if problem:
            remedy = "pack the archive without it, or unpack it yourself"
            raise DataError(f"{uri}: member {name!r} {problem}: {remedy}", file=uri, member=name)
        yield name, member


def _zip_entries(opened: zipfile.ZipFile) -> Iterator[tuple[str, Any, str]]:
    # Some programs of Windows write the separators of their system.
    separator = "\\" if not any("/" in info.filename for info in opened.infolist()) else "/"
    for info in opened.infolist():
        if not info.filename.endswith(separator):
            link = "is a link or no regular file" if stat.S_ISLNK(info.external_attr >> 16) else ""
            name = info.filename.replace(separator, "/").removeprefix("./")
            yield name, info, "has a password" if info.flag_bits & 1 else link


def _tar_entries(uri: str, opened: tarfile.TarFile) -> Iterator[tuple[str, Any, str]]:
    for info in _iterate_tar(uri, opened):
        if not info.isdir():
            yield info.name.removeprefix("./"), info, "" if info.isreg() else "is a link or no regular file"


def _iterate_tar(uri: str, opened: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    try:
        yield from opened
    except (*_ARCHIVE_ERRORS, OSError) as error:
        reason = f"is truncated or broken: {error}"
        raise DataError(f"{uri}: {reason}; mend it, or leave it out with a glob", file=uri) from error


def is_hidden(name: str) -> bool:
    """Returns whether a file or folder of this name is no data: hidden, or a marker of Spark, Hadoop or Python."""
    marker = name[:1] == "_" and (name == "__pycache__" or _MARKERS.fullmatch(name) is not None)
    return marker or (name[:1] == "." and name != "..")


def _has_hidden_part(parts: list[str]) -> bool:
    return any(part == "__MACOSX" or is_hidden(part) for part in parts)


def _open_member(uri: str, name: str, opened: Any, member: Any) -> IO[bytes]:
    try:
        stream = opened.open(member) if isinstance(opened, zipfile.ZipFile) else opened.extractfile(member)
    except (*_ARCHIVE_ERRORS, OSError) as error:
        raise _broken_member_error(uri, name, error) from error
    assert stream is not None
    return stream  # type: ignore[no-any-return]


def _read_block(uri: str, name: str, stream: IO[bytes]) -> bytes:
    try:
        return stream.read(1 << 20)
    except (*_ARCHIVE_ERRORS, OSError) as error:
        raise _broken_member_error(uri, name, error) from error


def _broken_member_error(uri: str, name: str, error: Exception) -> DataError:
    return DataError(
        f"{uri}: member {name!r} cannot be read ({str(error) or type(error).__name__}): pack the archive anew, or unpack it "
        "yourself",
        file=uri,
        member=name,
    )
