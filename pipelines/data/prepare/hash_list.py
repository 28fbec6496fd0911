"""Per-chunk checksums of a shard: they verify a piece that is fetched alone.

A shard is cut into leaves of 64 KiB. Each leaf's BLAKE2b of 16 bytes is stored in a file beside the shard, and the BLAKE2b
of that file in the manifest, as in a Merkle tree of two levels: the manifest authenticates every leaf.

    put_hash_list(folder, "train/00003.arrow", hash_list(content))    # the top hash, 32 hexadecimal digits
    leaves = parse_hash_list(content, top_hash)               # raises ValueError if it has another top hash
    leaves.matches(first_byte, piece)                         # whether these are the shard's bytes from there on
"""

import hashlib
from dataclasses import dataclass
from typing import Any

from raystride.pipelines.system.storage.folder import Folder

LEAF_BYTES = 64 << 10
"""Bytes in a leaf; the last one of a shard may have fewer."""
HASH_BYTES = 16
"""Bytes in a hash: 128 bits, enough to make a second content with the same hash infeasible."""
SUFFIX = ".hashes"
MAX_HASH_LISTS = 4096
"""Number of hash lists that a reader keeps in memory, 8 KiB for a shard of 32 MiB."""


def hash_list_name(shard: str) -> str:
    """Returns the name of a shard's hash list: `train/00003.hashes`."""
    return f"{shard.rpartition('.')[0]}{SUFFIX}"


def hash_list(content: bytes | memoryview) -> bytes:
    """Returns the concatenated hashes of all leaves of some content that begins with a leaf."""
    view = memoryview(content)
    return b"".join(_blake2b(view[offset : offset + LEAF_BYTES]) for offset in range(0, len(view), LEAF_BYTES))


def put_hash_list(folder: Folder, shard: str, leaves: bytes) -> str:
    """Writes the hash list of a shard, `hash_list` of its content, and returns its top hash."""
    folder.put(hash_list_name(shard), leaves)
    return _blake2b(leaves).hex()


@dataclass(frozen=True)
class HashList:
    """Hashes of a shard's leaves."""

    leaves: bytes

    def matches(self, first: int, content: bytes | memoryview) -> bool:
        """Returns whether `content` equals the shard from byte `first` on, which begins a leaf, up to the end of a leaf or
        the shard."""
        offset = first // LEAF_BYTES * HASH_BYTES
        found = hash_list(content)
        return self.leaves[offset : offset + len(found)] == found


def parse_hash_list(content: bytes, top_hash: str) -> HashList:
    """Returns the hash list in a file's content. Raises ValueError if its hash is not `top_hash`, as the manifest has it."""
    if _blake2b(content).hex() != top_hash:
        raise ValueError(f"a hash list has the hash {_blake2b(content).hex()}, not {top_hash}")
    return HashList(content)


def _blake2b(content: bytes | memoryview) -> bytes:
    return hashlib.blake2b(content, digest_size=HASH_BYTES).digest()


def is_intact(folder: Folder, shard: dict[str, Any]) -> bool:
    """Returns whether a shard of an interrupted preparation is present and unchanged."""
    try:
        on_disk = not shard.get("top_hash") or folder.exists(hash_list_name(shard["file"]))
        return on_disk and folder.sha256(shard["file"]) == str(shard["sha256"])
    except OSError:
        return False
