"""A node-local copy of remote shards, bounded in bytes, shared by the workers of a node.

The least recently used files go first. A file that a worker has mapped stays readable after it is gone from the folder,
which therefore lies on a disk of the node's own: on a network drive that holds for the same machine alone.

    cache = NodeCache(Path("/tmp/raystride-cache"), most_bytes=32 << 30)
    path = cache.fetch(folder, "train/00003.arrow", shard_bytes)
"""

import hashlib
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from raystride.pipelines.config import Config
from raystride.pipelines.files import Folder
from raystride.pipelines.locks import locked
from raystride.pipelines.node_folder import node_folder, open_private

LOCKS = "locks"
OTHERS_S = 600.0
"""Seconds that a worker waits for another one's download of the same file, and then fetches it itself: a put is whole."""
LEFT_S = 86400.0
"""Age at which what a killed download has left is removed."""


@dataclass(frozen=True)
class NodeCache:
    """Files fetched to this node, at most `most_bytes` of them, but always those that are asked for now."""

    root: Path
    most_bytes: int

    def fetch(self, folder: Folder, name: str, size: int) -> Path:
        """The local path of a file of `size` bytes; downloads it once a node, whichever worker asks first.

        Raises OSError where it cannot be downloaded, SettingError where the cache's place is another user's.
        """
        target = self.root / hashlib.sha256(f"{folder / name}".encode()).hexdigest()[:32]
        if not _is_whole(target, size):
            open_private(self.root)
            (self.root / LOCKS).mkdir(exist_ok=True)
            with locked(self.root / LOCKS / target.name[:2], OTHERS_S):  # who wants another file need not wait for this one
                if not _is_whole(target, size):
                    with locked(self.root / LOCKS / "room", OTHERS_S):
                        self._make_room(size)
                    folder.download(name, target)
        # The time of the last use, by which `_make_room` chooses.
        with suppress(FileNotFoundError):  # another worker needed its room; then the next look finds it gone
            os.utime(target)
        return target

    def _make_room(self, size: int) -> None:
        found = []
        for path in self.root.iterdir():
            with suppress(FileNotFoundError):
                state = path.stat()
                if ".tmp-" in path.name:
                    if time.time() - state.st_mtime > LEFT_S:
                        path.unlink()
                elif path.is_file():
                    found.append((state.st_mtime, state.st_size, path))
        held = sum(bytes_ for _, bytes_, _ in found)
        for _, bytes_, path in sorted(found):
            if held + size <= self.most_bytes:
                return
            held -= bytes_
            path.unlink(missing_ok=True)


def _is_whole(path: Path, size: int) -> bool:
    try:
        return path.stat().st_size == size
    except FileNotFoundError:
        return False


def node_cache(config: Config) -> NodeCache:
    """The cache of this node, as large as `data.cache_gib` says."""
    return NodeCache(node_folder(), int(config.data.cache_gib * 2**30))
