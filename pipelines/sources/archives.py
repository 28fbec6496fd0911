"""Zip and tar archives: their members are files like others, once the node that reads them has unpacked them.

A member that leads out of the archive, is a link, has a password, is broken or an archive itself is refused by its name, and
so is an archive that grows without measure. Unpacked archives lie in `node_folder("-unpacked")`, and those that nobody has
read for a week go when another one comes.

    members(File("/data/mails.zip", "mails.zip", 20_480))     # [File("/.../mails.zip/a.csv", "a.csv", 52_113, archive=...)]
    at_hand(file)                                             # unpacks its archive where this node has not yet
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

from raystride.pipelines.credentials import masked
from raystride.pipelines.files import filesystem
from raystride.pipelines.locks import locked
from raystride.pipelines.node_folder import node_folder, open_private
from raystride.pipelines.sources.faults import REMEDY, DataError, Fault, Faulty, faults_of
from raystride.pipelines.sources.pieces import Archive, File

TARS = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tar.zst")
ARCHIVES = (".zip", *TARS)
"""Endings of archives that are read."""
FOREIGN = (".7z", ".rar", ".xz", ".lzma", ".tar.lz4", ".xlsx", ".docx", ".pdf")
"""Endings of files that hold others, or text in a form that is not read: they must never pass for text."""
MAGIC = {b"PK\x03\x04": "a zip archive", b"\x1f\x8b": "a gzip file", b"BZh": "a bzip2 file", b"\xfd7zXZ": "an xz file",
         b"(\xb5/\xfd": "a zstd file", b"7z\xbc\xaf": "a 7z archive", b"Rar!": "a rar archive", b"%PDF-": "a PDF",
         b"PAR1": "a Parquet file", b"\x89PNG": "an image", b"\xff\xd8\xff": "an image"}  # fmt: skip
"""What files of these forms begin with, whatever they are called."""
RATIO, AT_LEAST = 200, 1 << 30
"""An archive may become so many times larger, and as large as AT_LEAST whatever its size: text becomes ten times larger."""
_MARKERS = re.compile(r"_SUCCESS|_temporary|_metadata|_common_metadata|_delta_log|_spark_metadata|_(committed|started)_.*")
"""What Spark, Hadoop and Databricks write beside data of any kind."""
MEMBERS = 5_000_000
SPARE = 1 << 30
"""Bytes of the disk that are left free."""
KEPT_S = 7 * 24 * 3600.0
OTHERS_S = 3600.0
"""Seconds that a process waits for others, which may unpack large archives."""

_BROKEN = (
    zipfile.BadZipFile,
    tarfile.TarError,
    zlib.error,
    lzma.LZMAError,
    EOFError,
    NotImplementedError,
    RuntimeError,
    ValueError,
)


def members(archive: File) -> list[File]:
    """The files in an archive, in the order of their names, without hidden ones. Raises DataError.

    A folder that holds all of them is left out of their names, unless it is the only one.
    """
    place = (
        node_folder("-unpacked")
        / hashlib.sha256(f"{masked(archive.uri)} {archive.size} {archive.stamp}".encode()).hexdigest()[:16]
    )
    kept = Archive(archive.uri, archive.size, str(place / os.path.basename(archive.name)))
    _unpack(kept)
    found = []
    for folder, _, names in os.walk(kept.folder):
        found += [os.path.relpath(os.path.join(folder, name), kept.folder) for name in names]
    if not found:
        raise DataError(f"{archive.uri}: holds no files: name an archive with data", file=archive.uri)
    tops = {name.partition("/")[0] for name in found}
    drop = len(tops.pop()) + 1 if len(tops) == 1 and any(name.count("/") > 1 for name in found) else 0
    # In bytes, as the files of a folder are sorted.
    return [_member(kept, archive, name, name[drop:]) for name in sorted(found)]


def _member(kept: Archive, archive: File, path: str, name: str) -> File:
    uri = f"{kept.folder}/{path}"
    return File(uri, name, os.path.getsize(uri), archive.stamp, archive.encoding, archive=kept)


def is_archive(name: str) -> bool:
    """Whether a file of this name is an archive that is read."""
    return name.lower().endswith(ARCHIVES)


def foreign(file: File, start: bytes = b"") -> Fault | None:
    """The fault of a file that holds others, or text, in a form that is not read, by its name and its first bytes."""
    what = next((ending for ending in FOREIGN if file.name.lower().endswith(ending)), None)
    what = what or next((name for magic, name in MAGIC.items() if start.startswith(magic)), None)
    remedy = "unpack it, or save it as text, CSV, JSON lines or Parquet under a name that says so, or leave it out"
    return Fault(file.uri, f"is no text but holds {what.removeprefix('.')}", remedy) if what else None


def unnamable(file: File) -> Fault | None:
    """Returns the fault of a file whose name is no UTF-8, under which most libraries cannot open it."""
    try:
        file.uri.encode()
    except UnicodeEncodeError:
        return Fault(file.uri, "has a name that is not UTF-8", f"rename it, {REMEDY}")
    return None


def at_hand(file: File) -> None:
    """Unpacks the archive in which the file lies, unless this node has. Raises Faulty if it cannot be read by its name."""
    if fault := unnamable(file):
        raise Faulty(fault)
    if file.archive and not os.path.exists(file.uri):
        try:
            _unpack(file.archive)
        except DataError as error:
            raise Faulty(Fault(file.archive.uri, str(error))) from error


def _unpack(archive: Archive) -> None:
    """Unpacks into the archive's folder, unless it is there: whole or not at all, by one process at a time."""
    folder = Path(archive.folder)
    root = folder.parent.parent
    open_private(root)
    refusal = DataError(
        f"{archive.uri}: another process has been unpacking in {root} for {OTHERS_S / 3600:g} h", file=archive.uri
    )
    with locked(root / "lock", OTHERS_S, refusal):
        if not folder.is_dir():
            _forget(root)
            temporary = folder.parent.with_name(f"{folder.parent.name}.tmp-{uuid.uuid4().hex[:8]}")
            try:
                _write(archive, temporary / folder.name)
                shutil.rmtree(folder.parent, ignore_errors=True)
                temporary.rename(folder.parent)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
        os.utime(folder.parent)  # by which `_forget` knows when it was read last


def _forget(root: Path) -> None:
    for each in root.iterdir():
        with suppress(FileNotFoundError):
            if each.is_dir() and (".tmp-" in each.name or each.stat().st_mtime < time.time() - KEPT_S):
                shutil.rmtree(each, ignore_errors=True)


def _write(archive: Archive, folder: Path) -> None:
    folder.mkdir(parents=True)
    free = shutil.disk_usage(folder).free - SPARE
    most, written = max(AT_LEAST, archive.size * RATIO), 0
    try:
        with faults_of(archive.uri):
            system, path = filesystem(archive.uri)
            source = system.open_input_file(path)
        with source, closing(_opened(archive.uri, folder.name, source)) as opened:
            for number, (name, member) in enumerate(_entries(archive.uri, opened)):
                if number >= MEMBERS:
                    raise DataError(
                        f"{archive.uri}: has more than {MEMBERS:,} members: unpack it yourself", file=archive.uri
                    )
                with (
                    _content(archive.uri, name, opened, member) as stream,
                    _target(archive.uri, folder, name, opened) as out,
                ):
                    while data := _read(archive.uri, name, stream):
                        written += len(data)
                        if written > most:
                            raise DataError(
                                f"{archive.uri}: grows to more than {RATIO} times its size at {name!r}, as archives do "
                                "that are made to fill a disk: if it is none, unpack it yourself and name the folder",
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
    except Faulty as faulty:
        raise faulty.fault.error() from faulty


def _target(uri: str, folder: Path, name: str, opened: Any) -> IO[bytes]:
    """The file into which a member is unpacked. Raises DataError for a name that cannot be one, or is there already.

    In a tar a later member is the newer one, as `tar --update` appends it.
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


def _opened(uri: str, name: str, stream: Any) -> Any:
    """The archive. Raises DataError where it is none."""
    try:
        if name.lower().endswith(".zst"):
            from pyarrow import CompressedInputStream

            return tarfile.open(fileobj=CompressedInputStream(stream, "zstd"), mode="r|")
        return zipfile.ZipFile(stream) if name.lower().endswith(".zip") else tarfile.open(fileobj=stream, mode="r:*")
    except (*_BROKEN, OSError) as error:
        reason = f"is no archive, or a broken one: {error}"
        raise DataError(f"{uri}: {reason}; mend it, or leave it out with a glob", file=uri) from error


def _entries(uri: str, opened: Any) -> Iterator[tuple[str, Any]]:
    """The members that are files, with their names. Raises DataError for one that cannot be taken."""
    for name, member, problem in _zipped(opened) if isinstance(opened, zipfile.ZipFile) else _in_tar(uri, opened):
        parts = name.split("/")
        if _hidden(parts):
            continue
        if name.startswith(("/", "\\")) or ".." in parts or "\\" in name or "\0" in name:
            problem = "leads out of the archive"
        elif is_archive(name) or name.lower().endswith((".7z", ".rar")):
            problem = "is an archive in an archive"
        if problem:
            remedy = "pack the archive without it, or unpack it yourself"
            raise DataError(f"{uri}: member {name!r} {problem}: {remedy}", file=uri, member=name)
        yield name, member


def _zipped(opened: zipfile.ZipFile) -> Iterator[tuple[str, Any, str]]:
    for info in opened.infolist():
        if not info.is_dir():
            link = "is a link or no regular file" if stat.S_ISLNK(info.external_attr >> 16) else ""
            yield info.filename.removeprefix("./"), info, "has a password" if info.flag_bits & 1 else link


def _in_tar(uri: str, opened: tarfile.TarFile) -> Iterator[tuple[str, Any, str]]:
    for info in _tar_entries(uri, opened):
        if not info.isdir():
            yield info.name.removeprefix("./"), info, "" if info.isreg() else "is a link or no regular file"


def _tar_entries(uri: str, opened: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    try:
        yield from opened
    except (*_BROKEN, OSError) as error:
        reason = f"is truncated or broken: {error}"
        raise DataError(f"{uri}: {reason}; mend it, or leave it out with a glob", file=uri) from error


def is_hidden(name: str) -> bool:
    """Returns whether a file or folder of this name is no data: hidden, or what Spark, Hadoop and Python write beside it."""
    marker = name[:1] == "_" and (name == "__pycache__" or _MARKERS.fullmatch(name) is not None)
    return marker or (name[:1] == "." and name != "..")


def _hidden(parts: list[str]) -> bool:
    return any(part == "__MACOSX" or is_hidden(part) for part in parts)


def _content(uri: str, name: str, opened: Any, member: Any) -> IO[bytes]:
    try:
        stream = opened.open(member) if isinstance(opened, zipfile.ZipFile) else opened.extractfile(member)
    except (*_BROKEN, OSError) as error:
        raise _broken(uri, name, error) from error
    assert stream is not None
    return stream  # type: ignore[no-any-return]


def _read(uri: str, name: str, stream: IO[bytes]) -> bytes:
    try:
        return stream.read(1 << 20)
    except (*_BROKEN, OSError) as error:
        raise _broken(uri, name, error) from error


def _broken(uri: str, name: str, error: Exception) -> DataError:
    return DataError(
        f"{uri}: member {name!r} cannot be read ({str(error) or type(error).__name__}): pack the archive anew, or unpack it "
        "yourself",
        file=uri,
        member=name,
    )
