"""One file-system layer: a folder on a local disk, or on anything that pyarrow or fsspec reaches, behind the same few calls.

Local folders use the operating system alone, so that training imports without pyarrow. A `put` is atomic: locally a
temporary name, fsync and rename; on object stores the object appears when its stream is closed.

    runs = Folder.at("s3://bucket/runs")              # or "runs", made absolute at once
    (runs / "my-run").put("config.yaml", b"...")
    for name in (runs / "my-run").names(): ...
"""

import hashlib
import json
import os
import shutil
import uuid
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from raystride.pipelines.credentials import masked, note, whole

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyarrow.fs import FileSystem


def absolute(path_or_uri: str, base: str | None = None) -> str:
    """The place as an absolute local path or a URI with its scheme; `file://` becomes a path. Relative ones join `base`."""
    if path_or_uri.startswith("file://"):
        path_or_uri = path_or_uri.removeprefix("file://")
    if "://" in path_or_uri:
        return path_or_uri.rstrip("/")
    return os.path.abspath(os.path.join(base or os.getcwd(), os.path.expanduser(path_or_uri)))


def filesystem(uri: str) -> "tuple[FileSystem, str]":
    """The pyarrow file system of a URI or path, and the path inside it; schemes unknown to pyarrow go through fsspec.

    Raises MissingSecret where the URI was written down without its password, and nothing gives it.
    """
    from pyarrow import ArrowInvalid
    from pyarrow.fs import FileSystem, FSSpecHandler, LocalFileSystem, PyFileSystem

    if "://" not in uri:
        return LocalFileSystem(), uri
    uri = whole(uri)
    try:
        known: tuple[FileSystem, str] = FileSystem.from_uri(uri)
        return known
    # A scheme that pyarrow does not know; fsspec has many more.
    except ArrowInvalid:
        from fsspec.core import url_to_fs

        handler, path = url_to_fs(uri)
        return PyFileSystem(FSSpecHandler(handler)), path


@dataclass(frozen=True)
class Folder:
    """A folder, which need not exist yet: writing makes it. Small enough to send to a worker."""

    uri: str
    """Absolute local path, or URI, with its secrets: what is shown of it is `str(folder)`."""

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
        return Folder(f"{self.uri.rstrip('/')}/{name}")

    def __str__(self) -> str:
        return masked(self.uri)

    def __repr__(self) -> str:
        return f"Folder({str(self)!r})"

    @property
    def local(self) -> Path | None:
        """The folder as a path where it is on a local (or mounted) disk, else None."""
        return None if "://" in self.uri else Path(self.uri)

    def _remote(self, name: str = "") -> "tuple[FileSystem, str]":
        return filesystem(f"{self.uri}/{name}" if name else self.uri)

    def read(self, name: str) -> bytes:
        """The bytes of a file. Raises FileNotFoundError."""
        if self.local:
            return (self.local / name).read_bytes()
        system, path = self._remote(name)
        with system.open_input_stream(path) as stream:
            return bytes(stream.read())

    def read_json(self, name: str) -> Any:
        """A JSON file's content. Raises FileNotFoundError, or ValueError where it is no JSON."""
        return json.loads(self.read(name))

    def put(self, name: str, content: bytes | str) -> None:
        """Writes a whole file, or nothing: a reader never meets half of it, not even after a crash."""
        data = content.encode() if isinstance(content, str) else content
        with self.writer(name) as stream:
            stream.write(data)

    def put_json(self, name: str, content: Any) -> None:
        """Writes `content` as JSON, atomically."""
        self.put(name, json.dumps(content, indent=1, sort_keys=True) + "\n")

    @contextmanager
    def writer(self, name: str) -> "Iterator[IO[bytes]]":
        """A stream whose file appears, whole, when the block ends without an exception."""
        if self.local:
            with _local_writer(self.local / name) as stream:
                yield stream
            return
        # An object store shows an object only once its stream is closed; a failed block must therefore not close it
        # by itself, so the bytes are gathered in a local file first.
        import tempfile

        with tempfile.NamedTemporaryFile() as stream:
            yield stream
            stream.flush()
            self.upload(Path(stream.name), name)

    def upload(self, source: Path, name: str) -> None:
        """Copies a local file here under `name`."""
        if self.local:
            with _local_writer(self.local / name) as out, source.open("rb") as stream:
                shutil.copyfileobj(stream, out, 1 << 20)
            return
        system, path = self._remote(name)
        system.create_dir(os.path.dirname(path), recursive=True)
        with system.open_output_stream(path) as out, source.open("rb") as stream:
            shutil.copyfileobj(stream, out, 1 << 20)

    def download(self, name: str, target: Path) -> None:
        """Copies a file from here to a local path, atomically. Raises FileNotFoundError."""
        with _local_writer(target) as out:
            if self.local:
                with (self.local / name).open("rb") as stream:
                    shutil.copyfileobj(stream, out, 1 << 20)
                return
            system, path = self._remote(name)
            with system.open_input_stream(path) as stream:
                shutil.copyfileobj(stream, out, 1 << 20)

    def exists(self, name: str = "") -> bool:
        """Whether a file or folder of that name (or this folder itself) is there."""
        if self.local:
            return (self.local / name).exists()
        system, path = self._remote(name)
        return bool(system.get_file_info(path).type)

    def size(self, name: str) -> int | None:
        """Bytes of a file; None where there is none."""
        if self.local:
            path = self.local / name
            return path.stat().st_size if path.is_file() else None
        system, path_inside = self._remote(name)
        size: int | None = system.get_file_info(path_inside).size
        return size

    def names(self) -> list[str]:
        """Names of files and folders directly inside, sorted, without temporary ones. Empty where there is no folder."""
        if self.local:
            found = os.listdir(self.local) if self.local.is_dir() else []
        else:
            from pyarrow.fs import FileSelector

            system, path = self._remote()
            found = [info.base_name for info in system.get_file_info(FileSelector(path, allow_not_found=True))]
        # What is still being written, or was when its writer was killed, is not there yet.
        return sorted(name for name in found if ".tmp-" not in name)

    def remove(self, name: str = "") -> None:
        """Removes a file, or a folder with all it holds (this one, where no name is given), if there is one."""
        if self.local:
            target = self.local / name
            if target.is_dir() and not target.is_symlink():
                shutil.rmtree(target, ignore_errors=True)
            else:
                target.unlink(missing_ok=True)
            return
        from pyarrow.fs import FileType

        system, path = self._remote(name)
        kind = system.get_file_info(path).type
        if kind == FileType.Directory:
            system.delete_dir(path)
        elif kind == FileType.File:
            system.delete_file(path)

    def remove_temporary(self, before: float) -> None:
        """Removes what killed writers left here and below, last changed before a time in seconds since 1970."""
        if self.local:
            for path in self.local.rglob("*.tmp-*"):
                with suppress(FileNotFoundError):
                    if path.stat().st_mtime < before:
                        path.unlink()

    def sha256(self, name: str) -> str:
        """The SHA-256 of a file, as 64 hexadecimal digits, read in pieces."""
        if self.local:
            with (self.local / name).open("rb") as stream:
                return hashlib.file_digest(stream, "sha256").hexdigest()
        digest = hashlib.sha256()
        system, path = self._remote(name)
        with system.open_input_stream(path) as stream:
            while piece := stream.read(1 << 20):
                digest.update(piece)
        return digest.hexdigest()


@contextmanager
def _local_writer(target: Path) -> "Iterator[IO[bytes]]":
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f"{target.name}.tmp-{uuid.uuid4().hex[:8]}")
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
