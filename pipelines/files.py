"""One file-system layer: a folder on a local disk, or on anything that pyarrow or fsspec reaches, behind the same few calls.

Local folders use the operating system alone, so that training imports without pyarrow. A `put` is atomic everywhere: locally
a temporary name, fsync and rename; see `stores` for the rest. Each call goes through `retries`.

    runs = Folder.at("s3://bucket/runs?region=us-east-1")     # or "runs", made absolute at once
    (runs / "my-run").put("config.yaml", b"...")
    for name in (runs / "my-run").names(): ...
"""

import hashlib
import json
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from raystride.pipelines.credentials import masked, note
from raystride.pipelines.ranged_file import RangedFile
from raystride.pipelines.retries import retried
from raystride.pipelines.stores import Spill, address_below, client, is_temporary, split, temporary_name, whole_object

if TYPE_CHECKING:
    from pyarrow.fs import FileInfo, FileSystem

PIECE = 16 << 20
"""Bytes of a remote file that are read at a time, and that a writer holds before it sends them."""


def absolute(path_or_uri: str, base: str | None = None) -> str:
    """The place as an absolute local path or a URI with its scheme; `file://` becomes a path. Relative ones join `base`."""
    if path_or_uri.startswith("file://"):
        path_or_uri = path_or_uri.removeprefix("file://")
    if "://" in path_or_uri:
        place, query = split(path_or_uri)
        return place.rstrip("/") + query
    return os.path.abspath(os.path.join(base or os.getcwd(), os.path.expanduser(path_or_uri)))


def filesystem(uri: str) -> "tuple[FileSystem, str]":
    """The pyarrow file system of a URI or path, kept by the process, and the path inside it.

    Raises MissingSecret where the URI was written down without its password, and nothing gives it; ValueError for options
    that the scheme does not have, ImportError where fsspec lacks what it needs.
    """
    return client(uri)


def parent_and_name(path_or_uri: str) -> "tuple[Folder, str]":
    """The folder in which a path or URI lies, with the same options, and its name there."""
    place, query = split(path_or_uri)
    parent, _, name = place.rpartition("/")
    return Folder((parent or "/") + query), name


@dataclass(frozen=True)
class Folder:
    """A folder, which need not exist yet: writing makes it. Small enough to send to a worker."""

    uri: str
    """Absolute local path, or URI, with its secrets: what is shown of it is `str(folder)`. Its options
    (`?endpoint_override=...`) hold for all that is below.
    """

    def __post_init__(self) -> None:
        if "://" in self.uri:
            note(self.uri)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """In another process: it, too, keeps to itself what it must not say."""
        self.__dict__.update(state)
        self.__post_init__()

    @classmethod
    def at(cls, path_or_uri: str, base: str | None = None) -> "Folder":
        """The folder at a path or URI, made absolute now (against `base`, else the working directory)."""
        return cls(absolute(path_or_uri, base))

    def __truediv__(self, name: str) -> "Folder":
        return Folder(address_below(self.uri, name))

    def __str__(self) -> str:
        return masked(self.uri)

    def __repr__(self) -> str:
        return f"Folder({str(self)!r})"

    @property
    def name(self) -> str:
        """The last part of the path."""
        return parent_and_name(self.uri)[1]

    @property
    def parent(self) -> "Folder":
        """The folder in which this one lies."""
        return parent_and_name(self.uri)[0]

    @property
    def local(self) -> Path | None:
        """The folder as a path where it is on a local (or mounted) disk, else None."""
        return None if "://" in self.uri else Path(self.uri)

    def _remote(self, name: str = "") -> "tuple[FileSystem, str]":
        return client(address_below(self.uri, name))

    def read(self, name: str) -> bytes:
        """The bytes of a file. Raises FileNotFoundError."""
        return retried(lambda: self._read(name))

    def _read(self, name: str) -> bytes:
        if self.local:
            return (self.local / name).read_bytes()
        system, path = self._remote(name)
        with system.open_input_stream(path) as stream:
            return bytes(stream.read())

    def read_json(self, name: str) -> Any:
        """A JSON file's content. Raises FileNotFoundError, or ValueError where it is no JSON."""
        return json.loads(self.read(name))

    def read_pieces(self, name: str, start: int = 0, stop: int | None = None) -> Iterator[bytes]:
        """The bytes [start, stop) of a file (to its end, where `stop` is None), piece by piece. Raises FileNotFoundError,
        and EOFError where the file ends before `stop`.
        """
        with RangedFile(address_below(self.uri, name)) as source:
            end = source.size() if stop is None else stop
            for at in range(start, end, PIECE):
                wanted = min(PIECE, end - at)
                piece = source.read(at, wanted)
                if len(piece) < wanted:
                    raise EOFError(f"{self / name} ends at byte {at + len(piece):,}, before {end:,}")
                yield piece

    def put(self, name: str, content: bytes | str) -> None:
        """Writes a whole file, or nothing: a reader never meets half of it, not even after a crash."""
        data = content.encode() if isinstance(content, str) else content
        self.put_pieces(name, lambda: (data,))

    def put_json(self, name: str, content: Any) -> None:
        """Writes `content` as strict JSON, atomically."""
        self.put(name, strict_json(content, indent=1, sort_keys=True) + "\n")

    def put_pieces(self, name: str, pieces: Callable[[], Iterable[bytes | memoryview]]) -> None:
        """Writes a whole file, or nothing, from what `pieces()` gives, which is asked anew where a try has failed.

        For large files: what goes to a remote store goes there in parts, and lies on no disk of this machine.
        """

        def attempt() -> None:
            with self._whole(name) as stream:
                for piece in pieces():
                    stream.write(piece)

        retried(attempt)

    @contextmanager
    def _whole(self, name: str) -> Iterator[IO[bytes]]:
        """One try at a file that is there, whole, when the block has ended well."""
        with _local_writer(self.local / name) if self.local else whole_object(*self._remote(name)) as stream:
            yield stream

    @contextmanager
    def writer(self, name: str) -> Iterator[IO[bytes]]:
        """A stream whose file appears, whole, when the block ends without an exception.

        What is written cannot be asked for again: beyond 16 MiB, a remote store that fails for longer than its client is
        patient ends the block. `put_pieces` and `upload` begin anew.
        """
        with ExitStack() as stack:
            if self.local:
                yield stack.enter_context(self._whole(name))
                return
            stream = Spill(PIECE, lambda: stack.enter_context(self._whole(name)))
            yield cast("IO[bytes]", stream)  # it is written to, which is all of an IO that anybody needs here
            if (content := stream.held) is not None:
                self.put(name, content)

    @contextmanager
    def file(self, name: str) -> Iterator[Path]:
        """A path to write to, on this machine, whose file appears here when the block ends without an exception."""
        import tempfile

        if self.local:
            with _local_writer(self.local / name) as stream:
                yield Path(stream.name)
            return
        with tempfile.TemporaryDirectory() as scratch:
            yield Path(scratch) / "file"
            self.upload(Path(scratch) / "file", name)

    def upload(self, source: Path, name: str) -> None:
        """Copies a local file here under `name`, atomically. Raises FileNotFoundError where there is no such file."""
        self.put_pieces(name, lambda: _pieces_of(source))

    def download(self, name: str, target: Path) -> None:
        """Copies a file from here to a local path, atomically. Raises FileNotFoundError."""
        with _local_writer(target) as out:
            for piece in self.read_pieces(name):
                out.write(piece)

    def exists(self, name: str = "") -> bool:
        """Whether a file or folder of that name (or this folder itself) is there."""
        if self.local:
            path = self.local / name
            return retried(path.exists)
        return bool(self._info(name).type)

    def size(self, name: str) -> int | None:
        """Bytes of a file; None where there is none."""
        if self.local:
            path = self.local / name
            return retried(lambda: path.stat().st_size if path.is_file() else None)
        size: int | None = self._info(name).size
        return size

    def _info(self, name: str) -> "FileInfo":
        system, path = self._remote(name)
        return retried(lambda: system.get_file_info(path))

    def names(self) -> list[str]:
        """Names of files and folders directly inside, sorted, without temporary ones. Empty where there is no folder."""
        local = self.local
        if local:
            found = retried(lambda: os.listdir(local) if local.is_dir() else [])
        else:
            found = [info.base_name for info in self._listed(recursive=False)]
        # What is still being written, or was when its writer was killed, is not there yet.
        return sorted(name for name in found if not is_temporary(name))

    def sizes(self, *, temporary: bool = False) -> dict[str, int]:
        """Bytes of every file here and below, by path inside this folder, in one listing.

        `temporary`: also of those that writers have not finished.
        """
        local = self.local
        if local:
            found = retried(lambda: _local_sizes(local))
        else:
            from pyarrow.fs import FileType

            inside = len(self._remote()[1]) + 1
            infos = self._listed(recursive=True)
            found = {info.path[inside:]: info.size or 0 for info in infos if info.type == FileType.File}
        return {name: size for name, size in sorted(found.items()) if temporary or not is_temporary(name)}

    def _listed(self, *, recursive: bool) -> "list[FileInfo]":
        from pyarrow.fs import FileSelector

        system, path = self._remote()
        return retried(lambda: system.get_file_info(FileSelector(path, allow_not_found=True, recursive=recursive)))

    def remove(self, name: str = "") -> None:
        """Removes a file, or a folder with all it holds (this one if no name is given), if there is one. Raises OSError."""
        retried(lambda: self._remove(name))

    def _remove(self, name: str) -> None:
        if self.local:
            target = self.local / name
            if target.is_dir() and not target.is_symlink():
                _remove_tree(target)
            else:
                target.unlink(missing_ok=True)
            return
        from pyarrow.fs import FileType

        system, path = self._remote(name)
        kind = system.get_file_info(path).type
        try:
            if kind == FileType.Directory:
                system.delete_dir(path)
            elif kind == FileType.File:
                system.delete_file(path)
        except OSError:
            # After the file has gone pyarrow marks the folder that may now be empty, which some servers refuse.
            if system.get_file_info(path).type != FileType.NotFound:
                raise

    def remove_temporary(self, before: float) -> None:
        """Removes what killed writers left here and below, last changed before a time in seconds since 1970."""
        if self.local:
            for path in self.local.rglob("*.tmp-*"):
                with suppress(FileNotFoundError):
                    if is_temporary(path.name) and path.stat().st_mtime < before:
                        path.unlink()
            return
        system, _ = self._remote()
        for info in self._listed(recursive=True):
            if is_temporary(info.base_name) and info.mtime_ns is not None and info.mtime_ns < before * 1e9:
                with suppress(FileNotFoundError):
                    system.delete_file(info.path)

    def sha256(self, name: str) -> str:
        """The SHA-256 of a file, as 64 hexadecimal digits, read in pieces. Raises FileNotFoundError."""
        digest = hashlib.sha256()
        for piece in self.read_pieces(name):
            digest.update(piece)
        return digest.hexdigest()


def strict_json(content: Any, **options: Any) -> str:
    """Returns JSON in which numbers that it does not know (NaN, infinities) are null; options are those of `json.dumps`."""
    try:
        return json.dumps(content, allow_nan=False, **options)
    except ValueError:
        return json.dumps(_finite(content), allow_nan=False, **options)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(part) for key, part in value.items()}
    return [_finite(part) for part in value] if isinstance(value, list | tuple) else value


def _pieces_of(source: Path) -> Iterator[bytes]:
    with source.open("rb") as stream:
        while piece := stream.read(PIECE):
            yield piece


def _local_sizes(folder: Path) -> dict[str, int]:
    found = {}
    for path, _, names in os.walk(folder):
        for name in names:
            file = os.path.join(path, name)
            with suppress(FileNotFoundError):  # removed since it was listed
                found[os.path.relpath(file, folder)] = os.stat(file).st_size
    return found


@contextmanager
def _local_writer(target: Path) -> Iterator[IO[bytes]]:
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(temporary_name(target.name))
    try:
        with temporary.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        # Its bytes are on disk before its name is: after a power cut the name would else lead to an empty file.
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _fsync_folder(target.parent)


def _fsync_folder(folder: Path) -> None:
    """Makes a rename inside the folder survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove_tree(folder: Path) -> None:
    """Removes a folder with all it holds. What is gone already, as another process may have removed it, is no error."""

    def pass_over(function: object, path: str, raised: Any) -> None:
        error = raised if isinstance(raised, BaseException) else raised[1]
        if not isinstance(error, FileNotFoundError):
            raise error

    named: Any = {"onexc" if sys.version_info >= (3, 12) else "onerror": pass_over}
    shutil.rmtree(folder, **named)
