"""The hash list of a shard: by it a piece that was fetched alone is known to be right.

A shard is cut into leaves of 64 KiB. Each leaf's BLAKE2b of 16 bytes stands in a file beside the shard, and the BLAKE2b of
that file in the manifest, as in a Merkle tree of two levels: whoever believes the manifest believes any leaf.

    put_hash_list(folder, "train/00003.arrow", path)          # the top hash, 32 hexadecimal digits
    leaves = parse_hash_list(content, top_hash)               # raises ValueError where it is not the one
    leaves.holds(first_byte, piece)                           # whether these are the shard's bytes from there on
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from raystride.pipelines.files import Folder

LEAF = 64 << 10
"""Bytes in a leaf; the last one of a shard may have fewer."""
HASH = 16
"""Bytes in a hash: 128 bits, against which no second content is found."""
SUFFIX = ".hashes"


def hash_list_name(shard: str) -> str:
    """The name of a shard's hash list: `train/00003.hashes`."""
    return f"{shard.rpartition('.')[0]}{SUFFIX}"


def hash_list(content: bytes | memoryview) -> bytes:
    """The hashes of all leaves of some content that begins with a leaf, one after another."""
    view = memoryview(content)
    return b"".join(_hash(view[at : at + LEAF]) for at in range(0, len(view), LEAF))


def put_hash_list(folder: Folder, shard: str, path: Path) -> str:
    """Writes the hash list of a shard that lies at a local path; its top hash."""
    with path.open("rb") as stream:
        leaves = b"".join(_hash(leaf) for leaf in iter(lambda: stream.read(LEAF), b""))
    folder.put(hash_list_name(shard), leaves)
    return _hash(leaves).hex()


@dataclass(frozen=True)
class HashList:
    """The hashes of a shard's leaves."""

    leaves: bytes

    def holds(self, first: int, content: bytes) -> bool:
        """Whether `content` is what the shard has from byte `first` on, which begins a leaf, up to a leaf's or its end."""
        at = first // LEAF * HASH
        found = hash_list(content)
        return self.leaves[at : at + len(found)] == found


def parse_hash_list(content: bytes, top_hash: str) -> HashList:
    """The hash list in a file's content. Raises ValueError where it is not the one that the manifest names."""
    if _hash(content).hex() != top_hash:
        raise ValueError(f"a hash list has the hash {_hash(content).hex()}, not {top_hash}")
    return HashList(content)


def _hash(content: bytes | memoryview) -> bytes:
    return hashlib.blake2b(content, digest_size=HASH).digest()
