"""Remote shards: the same samples as from disk, with minimal bytes; damage is detected; old shards are readable."""

from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raystride.pipelines.data.feed.cache import NodeCache
from raystride.pipelines.data.feed.remote_shards import MAX_PIECE_BYTES, MIN_MAPS, MIN_PIECE_BYTES, RemoteShards, piece_bytes
from raystride.pipelines.data.feed.samples import Windows
from raystride.pipelines.data.feed.stream import TokenStream
from raystride.pipelines.data.prepare.manifest import Manifest, Shard, Shards
from raystride.pipelines.data.tasks import Task
from raystride.pipelines.system.storage.folder import Folder
from tests.pipelines.data.feed.far import FarStore, far_folder, fetched_bytes, prepared_text, reset_store

PreparedData = tuple[Folder, Manifest, Task]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> PreparedData:
    return prepared_text(tmp_path_factory.mktemp("far"), 1_200_000)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    reset_store()
    yield
    reset_store()


def _streams(prepared: PreparedData, cache: Path, most: int = 1 << 20) -> tuple[TokenStream, TokenStream]:
    folder, manifest, _ = prepared
    near = TokenStream(folder, manifest, "train", NodeCache(cache, most))
    assert folder.local
    return near, TokenStream(far_folder(folder.local), manifest, "train", NodeCache(cache, most))


@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_windows_and_their_pieces_are_those_of_a_disk(
    prepared: PreparedData, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    near, far = _streams(prepared, tmp_path_factory.mktemp("cache"))
    length = data.draw(st.sampled_from([1, 17, 30_000, 70_000]))
    starts = np.array(data.draw(st.lists(st.integers(0, near.tokens - length), min_size=1, max_size=6)), np.int64)
    assert far.remote_shards
    pieces, samples = far.remote_shards.pieces_of_tokens(starts, length)
    assert samples.tolist() == sorted(samples.tolist())
    far.remote_shards.cache.fetch([far.remote_shards.remote_piece(number) for number in set(pieces.tolist())])
    num_bytes = fetched_bytes()
    ids, _ = far.read_windows(starts, length)
    assert np.array_equal(ids, near.read_windows(starts, length)[0])
    ends = np.cumsum(prepared[1].splits["train"].column("tokens"))
    first, last = (np.searchsorted(ends, each, "right") for each in (starts, starts + length - 1))
    if np.array_equal(first, last):  # windows over borders of shards are known but for what lies between
        assert fetched_bytes() == num_bytes  # all that was needed was known beforehand
    reset_store()


def test_rows_are_those_of_a_disk_and_lie_about_where_they_are_looked_for(prepared: PreparedData, tmp_path: Path) -> None:
    near, far = _streams(prepared, tmp_path, 8 << 20)
    rows = np.random.default_rng(1).integers(0, near.examples, 50)
    assert far.remote_shards
    pieces, samples = far.remote_shards.pieces_of_rows(rows)
    assert set(samples.tolist()) == set(range(50))
    far.remote_shards.cache.fetch([far.remote_shards.remote_piece(number) for number in set(pieces.tolist())])
    FarStore.reads.clear()
    found, _ = far.read_rows(rows)
    assert [row.tolist() for row in found] == [row.tolist() for row in near.read_rows(rows)[0]]
    assert len(FarStore.reads) <= len(set(pieces.tolist())) / 4  # at borders an estimate is wrong
    assert [each.tolist() for each in far.read_heads()] == [each.tolist() for each in near.read_heads()]


def test_what_nobody_expected_is_let_go_soon_or_it_would_take_disk_beyond_the_bound(
    prepared: PreparedData, tmp_path: Path
) -> None:
    _, far = _streams(prepared, tmp_path / "cache", 32 * MIN_PIECE_BYTES)
    far.read_windows(np.arange(0, far.tokens - 17, MIN_PIECE_BYTES // 2), 17)  # a window in each piece
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path / "cache/pieces") in line]
    assert len(FarStore.reads) > 2 * MIN_MAPS
    assert 0 < len(mapped) <= MIN_MAPS


def test_a_cache_decides_how_large_pieces_are() -> None:
    assert piece_bytes(1) == piece_bytes(60 << 20) == MIN_PIECE_BYTES
    assert piece_bytes(1 << 28) == 512 << 10
    assert piece_bytes(1 << 40) == MAX_PIECE_BYTES


@pytest.mark.parametrize("ending", [".arrow", ".hashes"])
def test_a_flipped_byte_is_fetched_again_and_told(prepared: PreparedData, tmp_path: Path, ending: str) -> None:
    _, far = _streams(prepared, tmp_path)
    messages: list[str] = []
    assert far.remote_shards
    far.remote_shards.cache.log = messages.append
    left = [1]

    def flip(path: str, content: bytes) -> bytes:
        if not path.endswith(ending) or not left:
            return content
        left.pop()
        return bytes([content[0] ^ 1]) + content[1:]

    FarStore.damage = staticmethod(flip)
    near, _ = _streams(prepared, tmp_path)
    assert np.array_equal(far.read_windows(np.array([5]), 40)[0], near.read_windows(np.array([5]), 40)[0])
    assert len(messages) == 1
    assert "arrived damaged" in messages[0]


@pytest.mark.parametrize("what", ["content", "short", "list"])
def test_what_stays_damaged_is_an_error_that_names_it(prepared: PreparedData, tmp_path: Path, what: str) -> None:
    _, far = _streams(prepared, tmp_path)

    def damage(path: str, content: bytes) -> bytes:
        if path.endswith(".hashes") == (what == "list"):
            return content[:-1] if what == "short" else bytes([content[0] ^ 1]) + content[1:]
        return content

    FarStore.damage = staticmethod(damage)
    with pytest.raises(OSError, match=r"train/0000\d\.(arrow|hashes).*damaged where it lies"):
        far.read_windows(np.array([5]), 40)
    left = [path for path in (tmp_path / "pieces").rglob("*") if path.is_file()]
    assert not left  # nothing wrong is kept
    reset_store()
    assert far.read_windows(np.array([5]), 40)[0].shape == (1, 40)


def test_shards_without_hash_lists_are_fetched_whole_and_believed_by_their_hash(
    prepared: PreparedData, tmp_path: Path
) -> None:
    folder, manifest, task = prepared
    old = [replace(shard, top_hash="") for shard in manifest.splits["train"]]
    old[1] = manifest.splits["train"][1]  # a growing folder may have both
    mixed = (folder, replace(manifest, splits={"train": Shards.from_shards(old)}), task)
    near, far = _streams(mixed, tmp_path)
    samples = Windows(task, far)
    numbers = np.arange(0, samples.num_samples, 997)
    assert np.array_equal(samples.read_rows(numbers)[0], Windows(task, near).read_rows(numbers)[0])
    pieces, _ = samples.locate_pieces(np.arange(samples.num_samples))
    assert {(path[-11:], size) for path, _, size in FarStore.reads if "00001" not in path} == {
        (shard.file[-11:], shard.bytes) for shard in old if "00001" not in shard.file
    }
    assert isinstance(far.remote_shards, RemoteShards)
    assert next(far.remote_shards.remote_piece(number).size for number in set(pieces.tolist())) == old[0].bytes
    FarStore.damage = staticmethod(lambda path, content: content[:-1] + b"x")
    _, again = _streams(mixed, tmp_path / "other")
    with pytest.raises(OSError, match="damaged"):
        again.read_windows(np.array([5]), 4)


SHARD = Shard(file="train/0.arrow", tokens=400_000, documents=1, bytes=3 * MIN_PIECE_BYTES, sha256="a" * 64, ids_offset=8)
SHARD = replace(SHARD, top_hash="b" * 32)
COVERED_BY_HASHES = {"tokens", "documents", "bytes", "ids_offset", "mask_offset", "rows_offset", "rows"}
"""Fields of a shard that are not in the names of its pieces: with another one the file has another hash."""


def test_a_piece_of_anything_else_has_another_name(tmp_path: Path) -> None:
    """Every field of a shard, its folder, the size of pieces, and the number of the piece, each changed alone."""
    cache, small = NodeCache(tmp_path / "a", 1 << 30), NodeCache(tmp_path / "b", MIN_PIECE_BYTES)

    def name(shard: Shard = SHARD, place: str = "one", own: NodeCache = cache, number: int = 0) -> bytes:
        return RemoteShards(Folder(str(tmp_path / place)), np.dtype("<u2"), Shards.from_shards([shard]), own).piece_name(
            number
        )

    others = {"file": "train/1.arrow", "sha256": "c" * 64, "top_hash": "d" * 32}
    assert others.keys() | COVERED_BY_HASHES == {item.name for item in fields(Shard)}
    names = [name(), name(place="two"), name(own=small), name(own=small, number=1)]
    names += [name(replace(SHARD, **{key: value})) for key, value in others.items()]  # type: ignore[arg-type]
    assert len(set(names)) == len(names)
    assert {len(each) for each in names} == {16}
    first, second = replace(SHARD, file="train/1.arrow"), SHARD
    both = RemoteShards(Folder(str(tmp_path / "one")), np.dtype("<u2"), Shards.from_shards([first, second]), small)
    assert [both.piece_name(number) for number in range(3, 6)] == [name(own=small, number=number) for number in range(3)]
    assert both.remote_piece(4).name == both.piece_name(4)
