"""A stream reads any sample of any number of shards with few open files."""

import gc
import os
from pathlib import Path

import numpy as np
import pytest

from raystride.pipelines.data.feed.cache import NodeCache
from raystride.pipelines.data.feed.shard_files import MAX_MAPPED
from raystride.pipelines.data.feed.stream import TokenStream
from raystride.pipelines.data.prepare.manifest import Manifest, Shard, Shards
from raystride.pipelines.system.storage.folder import Folder

SHARDS = 3 * MAX_MAPPED
LENGTH = 16


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory) -> TokenStream:
    """Shards of one row each, filled with the shard's number, every other one with a mask."""
    folder, shards = tmp_path_factory.mktemp("prepared"), []
    for number in range(SHARDS):
        starts, ids, mask = np.array([0, LENGTH], "<i8"), np.full(LENGTH, number, "<u2"), np.full(LENGTH, 1, np.uint8)
        content = starts.tobytes() + ids.tobytes() + mask.tobytes()
        (folder / f"{number}.arrow").write_bytes(content)
        shards.append(
            Shard(
                file=f"{number}.arrow", tokens=LENGTH, documents=1, bytes=len(content), sha256="", ids_offset=16,
                mask_offset=16 + ids.nbytes if number % 2 else None, rows_offset=0, rows=1,
            )
        )  # fmt: skip
    manifest = Manifest(
        fingerprint="f", id_type="uint16", vocabulary_size=9, end_id=0, splits={"train": Shards.from_shards(shards)}
    )
    return TokenStream(Folder(str(folder)), manifest, "train", NodeCache(folder, 0))


def _maps(stream: TokenStream) -> int:
    return Path("/proc/self/maps").read_text().count(f"{stream._files._folder}/")


def test_all_shards_are_read_with_few_open(stream: TokenStream) -> None:
    gc.collect()  # other tests' maps, which would go amid the count
    before = len(os.listdir("/proc/self/fd"))
    for start in range(0, stream.tokens - 2 * LENGTH, LENGTH):  # a window over the border of two
        ids, _ = stream.read_windows(np.array([start + LENGTH // 2]), LENGTH)
        assert ids[0].tolist() == [start // LENGTH] * (LENGTH // 2) + [start // LENGTH + 1] * (LENGTH // 2)
        assert len(os.listdir("/proc/self/fd")) - before <= MAX_MAPPED
    assert _maps(stream) <= MAX_MAPPED


def test_rows_stay_readable_after_their_shard_is_let_go(stream: TokenStream) -> None:
    first, _ = stream.read_rows(np.array([0]))
    ids, masks = stream.read_rows(np.arange(SHARDS))
    assert [row.tolist() for row in ids] == [[number] * LENGTH for number in range(SHARDS)]
    assert masks is not None
    assert all(mask.all() for mask in masks)
    assert first[0].tolist() == [0] * LENGTH
    firsts, lengths = stream.read_heads()
    assert firsts.tolist() == list(range(SHARDS))
    assert set(lengths.tolist()) == {LENGTH}
    with pytest.raises(IndexError, match="beyond"):
        stream.read_rows(np.array([SHARDS]))


def test_the_shard_that_was_asked_for_the_longest_ago_is_let_go(stream: TokenStream) -> None:
    stream.read_rows(np.arange(MAX_MAPPED + 1))
    stream.read_rows(np.array([1, MAX_MAPPED + 1]))
    mapped = stream._files._mapped  # type: ignore[attr-defined]
    assert list(mapped) == [*range(3, MAX_MAPPED + 1), 1, MAX_MAPPED + 1]
