"""The file-system layer: one interface to folders on local disks and on all stores that pyarrow or fsspec supports.

Local folders use the operating system alone, so that training imports without pyarrow. A `put` is atomic everywhere: locally
by a temporary name, fsync and rename; for other stores see `object_stores`. Each call goes through `retries`.

    runs = Folder.from_uri("s3://bucket/runs?region=us-east-1")     # or "runs", made absolute at once
    (runs / "my-run").put("config.yaml", b"...")
    for name in (runs / "my-run").names(): ...
"""

import errno
import hashlib
import json
import math
import os
import shutil
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from raystride.pipelines.system.credentials import redact_uris, remember_secrets
from raystride.pipelines.system.storage.locks import make_folder, share_with_group
from raystride.pipelines.system.storage.object_stores import (
    SpillBuffer,
    atomic_object_writer,
    cached_filesystem,
    is_temporary_name,
    join_address,
    split_options,
    temporary_name,
)
from raystride.pipelines.system.storage.ranged_file import RangedFile
from raystride.pipelines.system.storage.retries import retry

if TYPE_CHECKING:
    from pyarrow.fs import FileInfo, FileSystem

CHUNK_BYTES = 16 << 20
"""Bytes of a remote file per read, and the bytes that a writer buffers before it starts an upload."""
UNWRITABLE_ERRNOS = (errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM)
"""Error numbers of a storage that cannot be written."""
FAILING_ERRNOS = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENXIO, errno.EMFILE, errno.ENFILE)
"""Error numbers of a device that fails, and of a process or machine without a free descriptor."""


def absolute_uri(path_or_uri: str, base: str | None = None) -> str:
    """Returns an absolute local path, or a URI without a final slash; `file://` gives a path. Relative paths join `base`."""
    if path_or_uri.startswith("file://"):
        path_or_uri = path_or_uri.removeprefix("file://")
    if "://" in path_or_uri:
        place, query = split_options(path_or_uri)
        return place.rstrip("/") + query
    return os.path.abspath(os.path.join(base or os.getcwd(), os.path.expanduser(path_or_uri)))


def resolve_filesystem(uri: str) -> "tuple[FileSystem, str]":
    """Returns the pyarrow file system of a URI or path, cached in the process, and the path inside it.

    Raises MissingSecret if the URI was stored without its password and nothing provides it, ValueError for options that the
    scheme does not have, ImportError if fsspec lacks a package for the scheme.
    """
    return cached_filesystem(uri)


def parent_and_name(path_or_uri: str) -> "tuple[Folder, str]":
    """Splits a path or URI into its parent folder, with the same options, and its name there."""
    place, query = split_options(path_or_uri)
    parent, _, name = place.rpartition("/")
    return Folder((parent or "/") + query), name


@dataclass(frozen=True)
class Folder:
    """A folder that need not exist: writing creates it. Cheap to send to workers."""

    uri: str
    """Absolute local path, or URI, with its secrets: to print it, use `str(folder)`. Its options
    (`?endpoint_override=...`) apply to everything below.
    """

    def __post_init__(self) -> None:
        if "://" in self.uri:
            remember_secrets(self.uri)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Unpickles the folder in another process, so that its secrets are redacted there, too."""
        self.__dict__.update(state)
        self.__post_init__()

    @classmethod
    def from_uri(cls, path_or_uri: str, base: str | None = None) -> "Folder":
        """Returns the folder of a path or URI, made absolute now (relative to `base`, else to the working directory)."""
        return cls(absolute_uri(path_or_uri, base))

    def __truediv__(self, name: str) -> "Folder":
        return Folder(join_address(self.uri, name))

    def __str__(self) -> str:
        return redact_uris(self.uri)

    def __repr__(self) -> str:
        return f"Folder({str(self)!r})"

    @property
    def name(self) -> str:
        """The last component of the path."""
        return parent_and_name(self.uri)[1]

    @property
    def parent(self) -> "Folder":
        """The parent folder."""
        return parent_and_name(self.uri)[0]

    @property
    def local(self) -> Path | None:
        """The folder's path if it is on a local (or mounted) disk, else None."""
        return None if "://" in self.uri else Path(self.uri)

    def _resolve_remote(self, name: str = "") -> "tuple[FileSystem, str]":
        return cached_filesystem(join_address(self.uri, name))

    def read(self, name: str) -> bytes:
        """Returns the bytes of a file. Raises FileNotFoundError."""
        return retry(lambda: self._read_once(name))

    def _read_once(self, name: str) -> bytes:
        if self.local:
            with _naming(self.local / name):
                return (self.local / name).read_bytes()
        system, path = self._resolve_remote(name)
        with system.open_input_stream(path) as stream:
            return bytes(stream.read())

    def read_json(self, name: str) -> Any:
        """Returns the content of a JSON file. Raises FileNotFoundError, or ValueError if it is no JSON."""
        return json.loads(self.read(name))

    def read_chunks(self, name: str, start: int = 0, stop: int | None = None) -> Iterator[bytes]:
        """Yields the bytes [start, stop) of a file in chunks; `stop` None reads to its end. Raises FileNotFoundError, and
        EOFError if the file ends before `stop`.
        """
        with RangedFile(join_address(self.uri, name)) as source:
            end = source.size() if stop is None else stop
            for position in range(start, end, CHUNK_BYTES):
                wanted = min(CHUNK_BYTES, end - position)
                piece = source.read(position, wanted)
                if len(piece) < wanted:
                    raise EOFError(f"{self / name} ends at byte {position + len(piece):,}, before {end:,}")
                yield piece

    def put(self, name: str, content: bytes | str) -> None:
        """Writes a file atomically: a reader never sees a part of it, even after a crash."""
        data = content.encode() if isinstance(content, str) else content
        self.put_chunks(name, lambda: (data,))

    def put_new(self, name: str, content: bytes) -> None:
        """Writes a file as `put` does, but on a disk replaces none: raises FileExistsError if there is one."""
        if self.local is None:
            self.put(name, content)
            return
        target = self.local / name
        retry(lambda: _write_new(target, content))

    def put_json(self, name: str, content: Any) -> None:
        """Writes `content` as strict JSON, atomically."""
        self.put(name, strict_json(content, indent=1, sort_keys=True) + "\n")

    def put_chunks(self, name: str, pieces: Callable[[], Iterable[bytes | memoryview]]) -> None:
        """Writes a file atomically from the chunks of `pieces()`; calls it again after a failed try.

        For large files: an upload is sent in parts, without a copy on a local disk.
        """

        def write_once() -> None:
            with self._open_atomic(name) as stream:
                for piece in pieces():
                    stream.write(piece)

        retry(write_once)

    @contextmanager
    def _open_atomic(self, name: str) -> Iterator[IO[bytes]]:
        """Opens a stream, in one try; its file appears atomically when the block ends without an exception."""
        with _local_writer(self.local / name) if self.local else atomic_object_writer(*self._resolve_remote(name)) as stream:
            yield stream

    @contextmanager
    def writer(self, name: str) -> Iterator[IO[bytes]]:
        """Opens a stream; its file appears atomically when the block ends without an exception.

        The written bytes cannot be requested again: beyond 16 MiB, the block fails if a remote store fails for longer than
        its client retries. `put_chunks` and `upload` start again instead.
        """
        with ExitStack() as stack:
            if self.local:
                yield stack.enter_context(self._open_atomic(name))
                return
            stream = SpillBuffer(CHUNK_BYTES, lambda: stack.enter_context(self._open_atomic(name)))
            yield cast("IO[bytes]", stream)  # callers only write to it
            if (content := stream.buffered_bytes) is not None:
                self.put(name, content)

    @contextmanager
    def file(self, name: str) -> Iterator[Path]:
        """Yields a local path to write to; its file appears in this folder when the block ends without an exception."""
        import tempfile

        if self.local:
            with _local_writer(self.local / name) as stream:
                yield Path(stream.name)
            return
        with tempfile.TemporaryDirectory() as scratch:
            yield Path(scratch) / "file"
            self.upload(Path(scratch) / "file", name)

    def upload(self, source: Path, name: str) -> None:
        """Copies a local file into this folder as `name`, atomically. Raises FileNotFoundError if it does not exist."""
        self.put_chunks(name, lambda: _read_local_chunks(source))

    def download(self, name: str, target: Path) -> None:
        """Copies a file of this folder to a local path, atomically. Raises FileNotFoundError."""
        with _local_writer(target) as target_stream:
            for piece in self.read_chunks(name):
                target_stream.write(piece)

    def exists(self, name: str = "") -> bool:
        """Returns whether a file or folder of that name (or this folder itself) exists."""
        if self.local:
            path = self.local / name
            return retry(lambda: _local_status(path)) is not None
        return bool(self._file_info(name).type)

    def size(self, name: str) -> int | None:
        """Returns the size of a file in bytes; None if it does not exist."""
        if self.local:
            path = self.local / name
            found = retry(lambda: _local_status(path))
            return found.st_size if found and stat.S_ISREG(found.st_mode) else None
        size: int | None = self._file_info(name).size
        return size

    def changed_at(self, name: str) -> float | None:
        """Returns the time of a file's last change by the storage's clock, in seconds since 1970; None if it does not
        exist, or the store does not say it.
        """
        if self.local:
            path = self.local / name
            found = retry(lambda: _local_status(path))
            return found.st_mtime if found else None
        changed = self._file_info(name).mtime_ns
        return None if changed is None else changed / 1e9

    def clock(self) -> float:
        """Returns the time by the storage's clock, that of its files: the change of one that is written and removed for it.

        Raises OSError, also for a store that says no times.
        """
        name = temporary_name("clock")
        self.put(name, b"")
        try:
            now = self.changed_at(name)
        finally:
            self.remove(name)
        if now is None:
            raise OSError(errno.ENOTSUP, "the store says no times of its files", str(self))
        return now

    def _file_info(self, name: str) -> "FileInfo":
        system, path = self._resolve_remote(name)
        return retry(lambda: system.get_file_info(path))

    def names(self) -> list[str]:
        """Returns the names of the folder's files and folders, sorted, without temporary ones. Empty if it is missing."""
        local = self.local
        if local:
            found = retry(lambda: _local_names(local))
        else:
            found = [info.base_name for info in self._list_remote(recursive=False)]
        # A temporary file is still being written, or its writer was killed.
        return sorted(name for name in found if not is_temporary_name(name))

    def sizes(self, *, temporary: bool = False) -> dict[str, int]:
        """Returns the size in bytes of every file below this folder, by relative path, from one listing.

        `temporary`: also of unfinished files.
        """
        local = self.local
        if local:
            found = retry(lambda: _local_sizes(local))
        else:
            from pyarrow.fs import FileType

            inside = len(self._resolve_remote()[1]) + 1
            infos = self._list_remote(recursive=True)
            found = {info.path[inside:]: info.size or 0 for info in infos if info.type == FileType.File}
        return {name: size for name, size in sorted(found.items()) if temporary or not is_temporary_name(name)}

    def _list_remote(self, *, recursive: bool) -> "list[FileInfo]":
        from pyarrow.fs import FileSelector

        system, path = self._resolve_remote()
        return retry(lambda: system.get_file_info(FileSelector(path, allow_not_found=True, recursive=recursive)))

    def remove(self, name: str = "") -> None:
        """Removes a file or a folder tree (this folder if no name is given), if it exists. Raises OSError."""
        retry(lambda: self._remove_once(name))

    def _remove_once(self, name: str) -> None:
        if self.local:
            target = self.local / name
            if target.is_dir() and not target.is_symlink():
                _remove_tree(target)
            else:
                target.unlink(missing_ok=True)
            return
        from pyarrow.fs import FileType

        system, path = self._resolve_remote(name)
        kind = system.get_file_info(path).type
        try:
            if kind == FileType.Directory:
                system.delete_dir(path)
            elif kind == FileType.File:
                system.delete_file(path)
        except OSError:
            # After deleting a file pyarrow creates a marker for a possibly empty folder, which some servers refuse.
            if system.get_file_info(path).type != FileType.NotFound:
                raise

    def remove_temporary(self, before: float) -> None:
        """Removes temporary files of killed writers in this tree, last changed before a time in seconds since 1970."""
        if self.local:
            for path in self.local.rglob("*.tmp-*"):
                with suppress(FileNotFoundError):
                    if is_temporary_name(path.name) and path.stat().st_mtime < before:
                        path.unlink()
            return
        system, _ = self._resolve_remote()
        for info in self._list_remote(recursive=True):
            if is_temporary_name(info.base_name) and info.mtime_ns is not None and info.mtime_ns < before * 1e9:
                with suppress(FileNotFoundError):
                    system.delete_file(info.path)

    def sha256(self, name: str) -> str:
        """Returns the SHA-256 of a file as 64 hexadecimal digits, read in chunks. Raises FileNotFoundError."""
        digest = hashlib.sha256()
        for piece in self.read_chunks(name):
            digest.update(piece)
        return digest.hexdigest()


def strict_json(content: Any, **options: Any) -> str:
    """Returns strict JSON, with null in place of NaN and infinities; options are those of `json.dumps`."""
    try:
        return json.dumps(content, allow_nan=False, **options)
    except ValueError:
        return json.dumps(_replace_non_finite(content), allow_nan=False, **options)


def _replace_non_finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _replace_non_finite(part) for key, part in value.items()}
    return [_replace_non_finite(part) for part in value] if isinstance(value, list | tuple) else value


def _read_local_chunks(source: Path) -> Iterator[bytes]:
    with source.open("rb") as stream:
        while piece := stream.read(CHUNK_BYTES):
            yield piece


def _local_status(path: Path) -> os.stat_result | None:
    """Returns the status of a path, None if there is nothing. `Path.exists` of Python 3.14 takes every error for that."""
    try:
        return path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None


def _local_names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _local_sizes(folder: Path) -> dict[str, int]:
    def raise_others(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError | NotADirectoryError):
            raise error

    found = {}
    for path, _, names in os.walk(folder, onerror=raise_others):  # by default a folder that cannot be read is left out
        for name in names:
            file = os.path.join(path, name)
            with suppress(FileNotFoundError):  # removed since it was listed
                found[os.path.relpath(file, folder)] = os.stat(file).st_size
    return found


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Has errors of reading, writing and fsync say the file, as those of opening do."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise


@contextmanager
def _local_writer(target: Path) -> Iterator[IO[bytes]]:
    make_folder(target.parent)
    temporary = target.with_name(temporary_name(target.name))
    try:
        with _naming(target), temporary.open("wb") as stream:
            share_with_group(temporary)
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        # fsync before the rename: else the name could lead to an empty file after a power cut.
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _fsync_folder(target.parent)


def _write_new(target: Path, content: bytes) -> None:
    """Writes a file, atomically. Raises FileExistsError if there is one; a disk without hard links may replace it."""
    temporary = target.with_name(temporary_name(target.name))
    with _local_writer(temporary) as stream:
        stream.write(content)
    try:
        os.link(temporary, target)
    except FileExistsError:
        if target.read_bytes() != content:  # else a network disk has lost the answer to this link, and it is tried again
            raise
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
            raise
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    _fsync_folder(target.parent)


def _fsync_folder(folder: Path) -> None:
    """Makes a rename in the folder durable across a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove_tree(folder: Path) -> None:
    """Removes a folder tree. Ignores files that are missing, as another process may have removed them."""

    def ignore_missing(function: object, path: str, raised: Any) -> None:
        error = raised if isinstance(raised, BaseException) else raised[1]
        if not isinstance(error, FileNotFoundError):
            raise error

    named: Any = {"onexc" if sys.version_info >= (3, 12) else "onerror": ignore_missing}
    shutil.rmtree(folder, **named)
