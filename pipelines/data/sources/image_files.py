"""Reads image files that rows name by path, restricted to permitted folders.

Rows are not trusted: their paths must be below the folder of their data set (or `data.image_root`), and a request to a
served model may read no file at all. At most `MAX_BYTES` are read, from regular files only.

    read_image("pictures/7.png", ImageAccess("/data/birds", ("/data/birds",)))    # b"\\x89PNG..."
    read_image("/etc/hostname", ImageAccess("/data/birds", ("/data/birds",)))     # FaultError: ... leads out of /data/birds
    read_image("pictures/7.png", NO_FILES)                                        # FaultError: ... no file is read here
"""

import os
import stat
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from raystride.pipelines.data.sources.faults import Fault, FaultError, raise_as_faults
from raystride.pipelines.system.storage.folder import absolute_uri, resolve_filesystem
from raystride.pipelines.system.storage.object_stores import join_address, split_options
from raystride.pipelines.system.storage.retries import retry

MAX_BYTES = 64 << 20
"""The maximal size of an image file; a larger one is no training image, or was made to fill the memory."""
REMEDY = "name the folder that they lie in with --data.image_root, or leave such rows out with --data.on_error skip"


@dataclass(frozen=True)
class ImageAccess:
    """The permitted paths of images."""

    folder: str
    """The base of relative paths: a path or URI."""
    roots: tuple[str, ...] | None
    """Paths or URIs of permitted folders. Empty: no file may be read. None: any file."""


NO_FILES = ImageAccess("", ())
"""For requests, whose rows contain their images."""
ANY_FILE = ImageAccess("", None)
"""For paths that the user typed."""


def read_image(name: str, image_access: ImageAccess) -> bytes:
    """Returns the bytes of an image file. Raises FaultError with the resolved path as its place."""
    uri = name
    if image_access.folder and "://" not in name and not name.startswith("/"):
        # After a `?`, a remote address has options, with which a row could choose another server.
        uri = join_address(image_access.folder, name.replace("?", "%3F") if "://" in image_access.folder else name)
    if image_access.roots == ():
        raise FaultError(
            Fault(name[:200], "is refused: no file is read here", "give the image's bytes, or a data: URI of them")
        )
    uri = absolute_uri(uri)
    with raise_as_faults(uri):
        found = _read_remote(uri, image_access) if "://" in uri else _read_local(uri, image_access)
    if len(found) > MAX_BYTES:
        raise FaultError(Fault(uri, f"is refused: it is larger than {MAX_BYTES >> 20} MiB", REMEDY))
    return found


def _read_local(path: str, image_access: ImageAccess) -> bytes:
    real = os.path.realpath(path)
    if image_access.roots is not None:
        roots = [os.path.realpath(absolute_uri(root)) for root in image_access.roots if "://" not in absolute_uri(root)]
        if not any(real.startswith(f"{root.rstrip('/')}/") for root in roots):
            raise _outside_error(path, image_access.roots)
    # Opening a pipe could block, and a device may be endless.
    with os.fdopen(os.open(real, os.O_RDONLY | os.O_NONBLOCK), "rb") as stream:
        if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            raise FaultError(Fault(path, "is refused: it is no regular file", REMEDY))
        return stream.read(MAX_BYTES + 1)


def _read_remote(uri: str, image_access: ImageAccess) -> bytes:
    if image_access.roots is not None and not any(_is_below(uri, absolute_uri(root)) for root in image_access.roots):
        raise _outside_error(uri, image_access.roots)
    system, path = resolve_filesystem(uri)

    def read() -> bytes:
        with system.open_input_stream(path) as stream:
            return bytes(stream.read(MAX_BYTES + 1))

    return retry(read)


def _is_below(uri: str, root: str) -> bool:
    """Returns whether a URI is below another one, on the same host and without `..`, in any encoding."""
    (scheme, host, path, *_), (root_scheme, root_host, root_path, *_) = urlsplit(uri), urlsplit(root)
    steps = unquote(path).replace("\\", "/").split("/")
    same = (scheme, host) == (root_scheme, root_host)
    if scheme not in ("http", "https"):
        same = same and split_options(uri)[1] == split_options(root)[1]  # options may name another server
    return same and ".." not in steps and path.startswith(f"{root_path.rstrip('/')}/")


def _outside_error(uri: str, roots: tuple[str, ...]) -> FaultError:
    return FaultError(Fault(uri, f"is refused: it leads out of {' and '.join(roots)}", REMEDY))
