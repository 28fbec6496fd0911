"""A node-local copy of remote shards, bounded in bytes, shared by the workers of a node.

The least recently used files go first. A file that a worker has mapped stays readable after it is gone from the folder.

    cache = NodeCache(Path("/tmp/raystride-cache"), most_bytes=32 << 30)
    path = cache.fetch(folder, "train/00003.arrow", shard_bytes)
"""

import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from raystride.pipelines.config import Config
from raystride.pipelines.files import Folder


@dataclass(frozen=True)
class NodeCache:
    """Files fetched to this node, at most `most_bytes` of them (but always the one asked for)."""

    root: Path
    most_bytes: int

    def fetch(self, folder: Folder, name: str, size: int) -> Path:
        """The local path of a file of `size` bytes; downloads it once a node, whichever worker asks first."""
        target = self.root / hashlib.sha256(f"{folder / name}".encode()).hexdigest()[:32]
        with self._locked():
            if not (target.exists() and target.stat().st_size == size):
                self._make_room(size)
                folder.download(name, target)
            # The time of the last use, by which `_make_room` chooses.
            os.utime(target)
        return target

    def _make_room(self, size: int) -> None:
        files = sorted((path for path in self.root.iterdir() if path.name != "lock"), key=lambda path: path.stat().st_mtime)
        held = sum(path.stat().st_size for path in files)
        for path in files:
            if held + size <= self.most_bytes:
                return
            held -= path.stat().st_size
            path.unlink(missing_ok=True)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self.root.mkdir(parents=True, exist_ok=True)
        with (self.root / "lock").open("w") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield


def node_cache(config: Config) -> NodeCache:
    """The cache of this node, in `$RAYSTRIDE_CACHE` or below the home directory, as large as `data.cache_gib` says."""
    place = Path(os.environ.get("RAYSTRIDE_CACHE", "~/.cache/raystride")).expanduser()
    return NodeCache(place, int(config.data.cache_gib * 2**30))
