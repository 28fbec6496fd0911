"""Remote stores behind `files.py`: addresses with options, clients that are kept, objects that appear whole or not at all.

An address is `<scheme>://<place>`, and for S3 options after it that every folder below it has too:

    place, query = split("s3://bucket/runs?endpoint_override=http://minio:9000&region=us-east-1")
    system, path = client("s3://bucket/runs/a")               # pyarrow's file system, "bucket/runs/a"
    with whole_object(system, path) as stream: ...            # there once the block has ended well
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

from raystride.pipelines.credentials import whole

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pyarrow.fs import FileSystem

_OPTIONS = re.compile(r"\?([A-Za-z_]\w*=[^&?]*(?:&[A-Za-z_]\w*=[^&?]*)*)$")
"""What pyarrow takes for options. A `?` in a glob has no `name=value` behind it."""
_PYARROW = ("s3", "gs", "gcs", "hdfs", "viewfs", "abfs", "abfss")
_ENDPOINTS = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3")
_ENVIRONMENT = (
    *_ENDPOINTS,
    *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION"),
    "AWS_REQUEST_CHECKSUM_CALCULATION",
)
"""What a client of S3 reads when it is made: with other values it is another client."""

_TEMPORARY = re.compile(r"\.tmp-[0-9a-f]{8}$")

_kept: "dict[tuple[object, ...], tuple[FileSystem, str]]" = {}
_making = threading.Lock()


def temporary_name(name: str) -> str:
    """Returns another name beside a file's, for what is still being written."""
    return f"{name}.tmp-{secrets.token_hex(4)}"


def is_temporary(name: str) -> bool:
    """Whether `temporary_name` may have made a name."""
    return _TEMPORARY.search(name) is not None


def split(address: str) -> tuple[str, str]:
    """An address without its options, and these with their `?`, or nothing. A local path has none, whatever it holds."""
    found = _OPTIONS.search(address) if "://" in address else None
    return (address[: found.start()], found[0]) if found else (address, "")


def address_below(address: str, name: str) -> str:
    """The address of `name` below another one, with the same options."""
    place, query = split(address)
    return f"{place.rstrip('/')}/{name}{query}" if name else address


def client(address: str) -> "tuple[FileSystem, str]":
    """The pyarrow file system of an address or path, and the path inside it; schemes unknown to pyarrow go through fsspec.

    A process keeps one client for each scheme, authority and options: making one anew reads settings and opens connections.
    Raises MissingSecret where the address was written down without its password, and nothing gives it; ValueError for
    options that the scheme does not have, ImportError where fsspec lacks what the scheme needs.
    """
    from pyarrow.fs import FSSpecHandler, LocalFileSystem, PyFileSystem

    if "://" not in address:
        return LocalFileSystem(), address
    address = whole(address)
    place, query = split(address)
    scheme, _, rest = place.partition("://")
    if scheme not in _PYARROW:
        from fsspec.core import url_to_fs

        handler, path = url_to_fs(address)  # fsspec keeps its clients itself
        return PyFileSystem(FSSpecHandler(handler)), path
    authority, _, inside = rest.partition("/")
    system, before = _keep(scheme, authority, query)
    return system, (before + unquote(inside)).rstrip("/")


def address_of(path: str, like: str) -> str:
    """The address of a path inside the file system of another address, as a listing gives it."""
    place, query = split(whole(like) if "://" in like else like)
    scheme, _, rest = place.partition("://")
    if scheme not in _PYARROW:
        # A web address is its own path, options and all; elsewhere a path has neither scheme nor host.
        return path if "://" in path else whole(like).rstrip("/").removesuffix(client(like)[1]) + path
    authority = rest.partition("/")[0]
    _, before = _keep(scheme, authority, query)
    # A name may hold what would be read as an option, or as a character in another spelling.
    return f"{scheme}://{authority}/{quote(path.removeprefix(before), safe='/ ~!$&()*+,;=:@')}{query}"


def _keep(scheme: str, authority: str, query: str) -> "tuple[FileSystem, str]":
    """A process's client for a scheme, authority and options, and what stands in front of its paths."""
    if scheme == "s3" and ("endpoint_override=" in query or any(map(os.environ.get, _ENDPOINTS))):
        # Many servers that speak S3 refuse the checksums that Amazon's client sends since 2025 in front of each upload.
        os.environ.setdefault("AWS_REQUEST_CHECKSUM_CALCULATION", "when_required")
    surroundings = tuple(os.environ.get(name) for name in _ENVIRONMENT) if scheme == "s3" else ()
    # A client's threads and connections do not survive a fork, so a child makes its own.
    key = (os.getpid(), scheme, authority, query, surroundings)
    with _making:
        if key not in _kept:
            system, path = _made(scheme, f"{scheme}://{authority}/x", query)
            _kept[key] = system, path.removesuffix("x")
        return _kept[key]


def _made(scheme: str, place: str, query: str) -> "tuple[FileSystem, str]":
    from pyarrow import ArrowInvalid
    from pyarrow.fs import FileSystem

    if scheme != "s3":
        made: tuple[FileSystem, str] = FileSystem.from_uri(place + query)
        return made
    # One request instead of three for an object of one part: nothing is sent before there is something to send.
    options = f"{query}{'&' if query else '?'}allow_delayed_open=true"
    try:
        made = FileSystem.from_uri(place + ("" if "allow_delayed_open" in query else options))
    except ArrowInvalid:
        made = FileSystem.from_uri(place + query)  # a pyarrow that does not know it, or a mistake in the user's options
    return made


@contextmanager
def whole_object(system: "FileSystem", path: str) -> "Iterator[IO[bytes]]":
    """A stream into an object that appears, whole, when the block ends, and not at all where it raises.

    S3 and Google's store show an object once its stream is closed. Others show it as it grows, or empty at first: there it
    gets its name afterwards, by a rename in the store.
    """
    if system.type_name in ("s3", "gcs"):
        stream = system.open_output_stream(path)
        try:
            yield stream
            stream.close()
        except BaseException:
            _never_close(stream)
            raise
        return
    with suppress(NotImplementedError):
        system.create_dir(os.path.dirname(path), recursive=True)
    temporary = temporary_name(path)
    try:
        with system.open_output_stream(temporary) as stream:
            yield stream
        _rename(system, temporary, path)
    except BaseException:
        with suppress(Exception):
            system.delete_file(temporary)
        raise


def _never_close(stream: object) -> None:
    """Keeps a stream for ever. pyarrow has no way to abort one, and closes what is dropped, which would publish a part.

    Tried on servers: what was dropped appeared, truncated; what was kept did not, nor when the process ended. The upload
    stays behind as after a kill, invisible, until the bucket's rule for incomplete uploads removes it. The copy in the store
    that would avoid it is one request, which Amazon bounds at 5 GB and pyarrow at three seconds without a byte.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(stream))


def _rename(system: "FileSystem", source: str, target: str) -> None:
    handler = getattr(system, "handler", None)
    if handler is not None:
        handler.fs.mv(source, target)
        return
    try:
        system.move(source, target)
    except NotImplementedError:  # Azure without a hierarchy of names
        system.copy_file(source, target)
        system.delete_file(source)
    except OSError:  # HDFS, where a rename replaces nothing
        system.delete_file(target)
        system.move(source, target)


class Spill(io.RawIOBase):
    """Holds what is written to it; what is more than `limit` bytes goes on to the stream that `begin` opens."""

    def __init__(self, limit: int, begin: "Callable[[], IO[bytes]]") -> None:
        self._limit, self._begin = limit, begin
        self._held = bytearray()
        self._onwards: IO[bytes] | None = None

    @property
    def held(self) -> bytes | None:
        """All that was written, as long as none of it went on; None then."""
        return bytes(self._held) if self._onwards is None else None

    def writable(self) -> bool:
        """Always, until it is closed, which commits nothing."""
        return True

    def write(self, data: "bytes | memoryview") -> int:  # type: ignore[override]
        """Takes all of it. Raises what the stream behind raises."""
        if self._onwards is None:
            if len(self._held) + len(data) <= self._limit:
                self._held += data
                return len(data)
            self._onwards = self._begin()
            self._onwards.write(self._held)
            self._held.clear()
        self._onwards.write(data)
        return len(data)
