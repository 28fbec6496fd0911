"""Single flipped bits of stored files, as disks and memory make them, and prepared data as older versions wrote it."""

from dataclasses import replace
from pathlib import Path

from raystride.pipelines.data.prepare.manifest import Manifest, Shards
from raystride.pipelines.system.storage.folder import Folder


def flip(data: bytes, bit: int) -> bytes:
    """Returns the bytes with one bit turned, counted from the first byte's lowest."""
    flipped = bytearray(data)
    flipped[bit // 8] ^= 1 << bit % 8
    return bytes(flipped)


def flip_bit(path: Path, offset: int) -> None:
    """Turns a bit of the byte at an offset of a file, in place; a second call turns it back."""
    with path.open("r+b") as stream:
        stream.seek(offset)
        byte = stream.read(1)
        stream.seek(offset)
        stream.write(flip(byte, 2))


def without_hash_lists(folder: Folder) -> None:
    """Gives prepared data the form of a version that wrote no lists of hashes."""
    manifest = Manifest.load(folder)
    splits = {
        split: Shards.from_shards(replace(shard, top_hash="") for shard in shards)
        for split, shards in manifest.splits.items()
    }
    replace(manifest, splits=splits).save(folder)
    for path in Path(str(folder)).rglob("*.hashes"):
        path.unlink()
