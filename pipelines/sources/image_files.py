"""The bytes of an image that a row names by its path, from where the row may lead and nowhere else.

Who wrote a row may not be who reads it: a path in it leads below the folder of its data set (or `data.image_root`), and a
request to a served model to no file at all. Never more than `MOST_BYTES` are read, and from nothing but regular files.

    read_image("pictures/7.png", Reach("/data/birds", ("/data/birds",)))      # b"\\x89PNG..."
    read_image("/etc/hostname", Reach("/data/birds", ("/data/birds",)))       # Faulty: ... leads out of /data/birds
    read_image("pictures/7.png", NOWHERE)                                     # Faulty: ... no file is read here
"""

import os
import stat
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from raystride.pipelines.files import absolute, filesystem
from raystride.pipelines.retries import retried
from raystride.pipelines.sources.faults import Fault, Faulty, faults_of
from raystride.pipelines.stores import address_below, split

MOST_BYTES = 64 << 20
"""A larger file is no picture that a network is trained on, or one that was made to fill the memory."""
REMEDY = "name the folder that they lie in with --data.image_root, or leave such rows out with --data.on_error skip"


@dataclass(frozen=True)
class Reach:
    """Where paths of images lead."""

    folder: str
    """What relative ones are relative to: a path or URI."""
    roots: tuple[str, ...] | None
    """Folders, as paths or URIs, below one of which they must end. Empty: no file may be named. None: any."""


NOWHERE = Reach("", ())
"""Where rows carry all they have: requests."""
ANYWHERE = Reach("", None)
"""Where the caller typed the path."""


def read_image(name: str, reach: Reach) -> bytes:
    """The bytes of an image's file. Raises Faulty, whose place is where the file was looked for."""
    uri = name
    if reach.folder and "://" not in name and not name.startswith("/"):
        # Behind a `?` in a remote address there would be options, by which a row could choose another server.
        uri = address_below(reach.folder, name.replace("?", "%3F") if "://" in reach.folder else name)
    if reach.roots == ():
        raise Faulty(Fault(name[:200], "is refused: no file is read here", "give the image's bytes, or a data: URI of them"))
    uri = absolute(uri)
    with faults_of(uri):
        found = _read_remote(uri, reach) if "://" in uri else _read_local(uri, reach)
    if len(found) > MOST_BYTES:
        raise Faulty(Fault(uri, f"is refused: it is larger than {MOST_BYTES >> 20} MiB", REMEDY))
    return found


def _read_local(path: str, reach: Reach) -> bytes:
    real = os.path.realpath(path)
    if reach.roots is not None:
        roots = [os.path.realpath(absolute(root)) for root in reach.roots if "://" not in absolute(root)]
        if not any(real.startswith(f"{root.rstrip('/')}/") for root in roots):
            raise _leads_out(path, reach.roots)
    # A pipe would keep whoever opens it waiting, and a device may have no end.
    with os.fdopen(os.open(real, os.O_RDONLY | os.O_NONBLOCK), "rb") as stream:
        if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            raise Faulty(Fault(path, "is refused: it is no regular file", REMEDY))
        return stream.read(MOST_BYTES + 1)


def _read_remote(uri: str, reach: Reach) -> bytes:
    if reach.roots is not None and not any(_below(uri, absolute(root)) for root in reach.roots):
        raise _leads_out(uri, reach.roots)
    system, path = filesystem(uri)

    def read() -> bytes:
        with system.open_input_stream(path) as stream:
            return bytes(stream.read(MOST_BYTES + 1))

    return retried(read)


def _below(uri: str, root: str) -> bool:
    """Whether a URI names something below another, of the same host and by no way up, however it is written."""
    (scheme, host, path, *_), (root_scheme, root_host, root_path, *_) = urlsplit(uri), urlsplit(root)
    steps = unquote(path).replace("\\", "/").split("/")
    same = (scheme, host) == (root_scheme, root_host)
    if scheme not in ("http", "https"):
        same = same and split(uri)[1] == split(root)[1]  # options may name another server
    return same and ".." not in steps and path.startswith(f"{root_path.rstrip('/')}/")


def _leads_out(uri: str, roots: tuple[str, ...]) -> Faulty:
    return Faulty(Fault(uri, f"is refused: it leads out of {' and '.join(roots)}", REMEDY))
