"""Remote stores behind `folder.py`: addresses with options, cached clients, and atomic writes of objects.

An address is `<scheme>://<path>`, for S3 followed by options that also apply to every folder below it:

    place, query = split_options("s3://bucket/runs?endpoint_override=http://minio:9000&region=us-east-1")
    system, path = cached_filesystem("s3://bucket/runs/a")    # pyarrow's file system, "bucket/runs/a"
    with atomic_object_writer(system, path) as stream: ...    # appears when the block ends without an exception
"""

import ctypes
import io
import os
import re
import secrets
import threading
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING
from urllib.parse import quote, unquote

from raystride.pipelines.system.credentials import restore_secrets

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pyarrow.fs import FileSystem

_OPTIONS_PATTERN = re.compile(r"\?([A-Za-z_]\w*=[^&?]*(?:&[A-Za-z_]\w*=[^&?]*)*)$")
"""pyarrow's options. A `?` in a glob is not followed by `name=value`."""
_PYARROW_SCHEMES = ("s3", "gs", "gcs", "hdfs", "viewfs", "abfs", "abfss")
_ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3")
_S3_VARIABLES = (
    *_ENDPOINT_VARIABLES,
    *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION"),
    "AWS_REQUEST_CHECKSUM_CALCULATION",
)
"""Variables that an S3 client reads when it is created: other values require another client."""

_TEMPORARY_NAME = re.compile(r"\.tmp-[0-9a-f]{8}$")

_clients: "dict[tuple[object, ...], tuple[FileSystem, str]]" = {}
_clients_lock = threading.Lock()


def temporary_name(name: str) -> str:
    """Returns a temporary name in the same folder, for a file that is being written."""
    return f"{name}.tmp-{secrets.token_hex(4)}"


def is_temporary_name(name: str) -> bool:
    """Returns whether a name has the form of `temporary_name`."""
    return _TEMPORARY_NAME.search(name) is not None


def split_options(address: str) -> tuple[str, str]:
    """Splits an address into the part without options, and the options with their `?`, or "". A local path has none."""
    found = _OPTIONS_PATTERN.search(address) if "://" in address else None
    return (address[: found.start()], found[0]) if found else (address, "")


def join_address(address: str, name: str) -> str:
    """Returns the address of `name` below another address, with the same options."""
    place, query = split_options(address)
    return f"{place.rstrip('/')}/{name}{query}" if name else address


def cached_filesystem(address: str) -> "tuple[FileSystem, str]":
    """Returns the pyarrow file system of an address or path, and the path inside it; fsspec serves other schemes.

    A process caches one client for each scheme, authority and options, since a new one reads settings and opens
    connections. Raises MissingSecret if the address was stored without its password and nothing provides it, ValueError for
    options that the scheme does not have, ImportError if fsspec lacks a package for the scheme.
    """
    from pyarrow.fs import FSSpecHandler, LocalFileSystem, PyFileSystem

    if "://" not in address:
        return LocalFileSystem(), address
    address = restore_secrets(address)
    place, query = split_options(address)
    scheme, _, rest = place.partition("://")
    if scheme not in _PYARROW_SCHEMES:
        from fsspec.core import url_to_fs

        handler, path = url_to_fs(address)  # fsspec caches its clients itself
        return PyFileSystem(FSSpecHandler(handler)), path
    authority, _, inside = rest.partition("/")
    system, prefix = _cached_client(scheme, authority, query)
    return system, (prefix + unquote(inside)).rstrip("/")


def address_of(path: str, like: str) -> str:
    """Returns the address of a path, as a listing gives it, inside the file system of the address `like`."""
    place, query = split_options(restore_secrets(like) if "://" in like else like)
    scheme, _, rest = place.partition("://")
    if scheme not in _PYARROW_SCHEMES:
        # A web address is its own path, including options; for other schemes a path has neither scheme nor host.
        return path if "://" in path else restore_secrets(like).rstrip("/").removesuffix(cached_filesystem(like)[1]) + path
    authority = rest.partition("/")[0]
    _, prefix = _cached_client(scheme, authority, query)
    # A name may contain characters that would be parsed as an option or a percent-encoding.
    return f"{scheme}://{authority}/{quote(path.removeprefix(prefix), safe='/ ~!$&()*+,;=:@')}{query}"


def _cached_client(scheme: str, authority: str, query: str) -> "tuple[FileSystem, str]":
    """Returns the process's client for a scheme, authority and options, and the prefix of its paths."""
    if scheme == "s3" and ("endpoint_override=" in query or any(map(os.environ.get, _ENDPOINT_VARIABLES))):
        # Many S3-compatible servers refuse the checksums that Amazon's client sends before each upload since 2025.
        os.environ.setdefault("AWS_REQUEST_CHECKSUM_CALCULATION", "when_required")
    surroundings = tuple(os.environ.get(name) for name in _S3_VARIABLES) if scheme == "s3" else ()
    # A client's threads and connections do not survive a fork, so a child creates its own.
    key = (os.getpid(), scheme, authority, query, surroundings)
    with _clients_lock:
        if key not in _clients:
            system, path = _create_client(scheme, f"{scheme}://{authority}/x", query)
            _clients[key] = system, path.removesuffix("x")
        return _clients[key]


def _create_client(scheme: str, place: str, query: str) -> "tuple[FileSystem, str]":
    from pyarrow import ArrowInvalid
    from pyarrow.fs import FileSystem

    if scheme != "s3":
        made: tuple[FileSystem, str] = FileSystem.from_uri(place + query)
        return made
    # One request instead of three for an object of one part: nothing is sent before there is data.
    options = f"{query}{'&' if query else '?'}allow_delayed_open=true"
    try:
        made = FileSystem.from_uri(place + ("" if "allow_delayed_open" in query else options))
    except ArrowInvalid:
        made = FileSystem.from_uri(place + query)  # an older pyarrow, or a mistake in the user's options
    return made


@contextmanager
def atomic_object_writer(system: "FileSystem", path: str) -> "Iterator[IO[bytes]]":
    """Opens a stream into an object that appears atomically when the block ends, and not at all if it raises.

    S3 and Google's store show an object once its stream is closed. Others show it while it grows, or empty at first: they
    get a temporary name and a rename in the store.
    """
    if system.type_name in ("s3", "gcs"):
        stream = system.open_output_stream(path)
        try:
            yield stream
            stream.close()
        except BaseException:
            _leak_stream(stream)
            raise
        return
    with suppress(NotImplementedError):
        system.create_dir(os.path.dirname(path), recursive=True)
    temporary = temporary_name(path)
    try:
        with system.open_output_stream(temporary) as stream:
            yield stream
        _rename_object(system, temporary, path)
    except BaseException:
        with suppress(Exception):
            system.delete_file(temporary)
        raise


def _leak_stream(stream: object) -> None:
    """Leaks a stream on purpose: pyarrow cannot abort one, and would close a dropped one and publish a truncated object.

    Tested on servers: dropped streams appeared, truncated; leaked ones did not, even after the process ended. The upload
    stays, invisible, as after a kill, until the bucket's rule for incomplete uploads removes it. A copy in the store would
    avoid this, but it is one request, limited to 5 GB by Amazon, and to three seconds without a byte by pyarrow.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(stream))


def _rename_object(system: "FileSystem", source: str, target: str) -> None:
    handler = getattr(system, "handler", None)
    if handler is not None:
        handler.fs.mv(source, target)
        return
    try:
        system.move(source, target)
    except NotImplementedError:  # Azure without a hierarchical namespace
        system.copy_file(source, target)
        system.delete_file(source)
    except OSError:  # HDFS: a rename does not replace an existing file
        system.delete_file(target)
        system.move(source, target)


class SpillBuffer(io.RawIOBase):
    """A buffer of at most `limit` bytes that spills to the stream of `open_stream` once it is full."""

    def __init__(self, limit: int, open_stream: "Callable[[], IO[bytes]]") -> None:
        self._limit, self._open_stream = limit, open_stream
        self._buffer = bytearray()
        self._stream: IO[bytes] | None = None

    @property
    def buffered_bytes(self) -> bytes | None:
        """The buffered bytes, or None once spilled to the stream."""
        return bytes(self._buffer) if self._stream is None else None

    def writable(self) -> bool:
        """Returns True. Closing it commits nothing."""
        return True

    def write(self, data: "bytes | memoryview") -> int:  # type: ignore[override]
        """Buffers or forwards all of it. Raises the stream's errors."""
        if self._stream is None:
            if len(self._buffer) + len(data) <= self._limit:
                self._buffer += data
                return len(data)
            self._stream = self._open_stream()
            self._stream.write(self._buffer)
            self._buffer.clear()
        self._stream.write(data)
        return len(data)
