"""Windows and rows of a stream across its shards, compared with one flat array."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raystride.pipelines.data.feed.cache import NodeCache
from raystride.pipelines.data.feed.stream import TokenStream
from raystride.pipelines.data.prepare.manifest import Manifest, Shard, Shards
from raystride.pipelines.data.prepare.shards import ShardWriter
from raystride.pipelines.system.storage.folder import Folder
from tests.pipelines.data.prepare.test_shards import table_of

shard_shapes = st.lists(
    st.tuples(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.booleans()), min_size=1, max_size=5
)
"""Lengths of a shard's rows, and whether it has masks."""


@dataclass
class Written:
    """Shards on disk, and their content."""

    folder: Path
    shards: list[Shard] = field(default_factory=list)
    rows: list[list[int]] = field(default_factory=list)
    masks: list[list[int]] = field(default_factory=list)
    """Ones where a shard has none."""

    def add(self, lengths: list[int], masked: bool) -> None:
        """Writes one more shard."""
        random, first = np.random.default_rng(len(self.shards)), len(self.rows)
        writer = ShardWriter(pa.uint16(), Folder(str(self.folder)))
        for length in lengths:
            self.rows.append(random.integers(0, 2**16, length).tolist())
            self.masks.append((random.integers(0, 2, length) if masked else np.ones(length, int)).tolist())
        own = zip(self.rows[first:], self.masks[first:], strict=True)
        writer.add(table_of([(number, True, True, ids, mask if masked else None) for number, (ids, mask) in enumerate(own)]))
        shard = writer.finish(f"train/{len(self.shards):05d}.arrow")
        assert shard
        self.shards.append(shard)

    def stream(self, shards: list[Shard] | None = None) -> TokenStream:
        """A stream of the shards, or of some."""
        splits = {
            "train": Shards.from_shards(self.shards if shards is None else shards),
            "validation": Shards.from_shards([]),
        }
        manifest = Manifest(fingerprint="", id_type="uint16", vocabulary_size=2**16, end_id=0, splits=splits)
        return TokenStream(Folder(str(self.folder)), manifest, "train", NodeCache(Path("/none"), 0))


def written(folder: Path, shapes: list[tuple[list[int], bool]]) -> Written:
    """Shards of these shapes."""
    found = Written(folder)
    for lengths, masked in shapes:
        found.add(lengths, masked)
    return found


@given(shapes=shard_shapes, length=st.integers(1, 12), random=st.randoms(use_true_random=False))
def test_a_window_is_neighbouring_tokens_whatever_shards_they_lie_in(
    tmp_path_factory: pytest.TempPathFactory, shapes: list[tuple[list[int], bool]], length: int, random: object
) -> None:
    files = written(tmp_path_factory.mktemp("stream"), shapes)
    stream, tokens = files.stream(), [each for row in files.rows for each in row]
    mask = [each for row in files.masks for each in row]
    assert (stream.tokens, stream.examples) == (len(tokens), len(files.rows))
    starts = np.arange(max(0, len(tokens) - length + 1))
    random.shuffle(starts)  # type: ignore[attr-defined]
    ids, masks = stream.read_windows(starts, length)
    assert (ids.dtype, ids.shape) == (np.int64, (len(starts), length))
    assert ids.tolist() == [tokens[start : start + length] for start in starts]
    if masks is not None:
        assert masks.tolist() == [[bool(each) for each in mask[start : start + length]] for start in starts]
    else:
        assert all(mask[start + at] for start in starts for at in range(length))
    assert stream.read_windows(np.arange(0), length)[1] is None
    with pytest.raises(IndexError, match=f"token {len(tokens)} is beyond the {len(tokens)} "):
        stream.read_windows(np.array([len(tokens) - length + 1]) if length <= len(tokens) else np.array([0]), length)


@given(shapes=shard_shapes, random=st.randoms(use_true_random=False))
def test_a_row_is_found_by_its_number_with_its_own_length(
    tmp_path_factory: pytest.TempPathFactory, shapes: list[tuple[list[int], bool]], random: object
) -> None:
    files = written(tmp_path_factory.mktemp("stream"), shapes)
    stream, numbers = files.stream(), np.arange(len(files.rows))
    random.shuffle(numbers)  # type: ignore[attr-defined]
    ids, masks = stream.read_rows(numbers)
    assert [row.tolist() for row in ids] == [files.rows[number] for number in numbers]
    if any(masked for _, masked in shapes):
        assert masks is not None
        assert [mask.tolist() for mask in masks] == [list(map(bool, files.masks[number])) for number in numbers]
        assert {mask.dtype for mask in masks} == {np.dtype(bool)}
    else:
        assert masks is None
    firsts, lengths = stream.read_heads()
    assert firsts.tolist() == [row[0] for row in files.rows]
    assert lengths.tolist() == [len(row) for row in files.rows]
    assert (firsts.dtype, lengths.dtype) == (np.int64, np.int64)
    with pytest.raises(IndexError, match=f"example {len(files.rows)} is beyond the {len(files.rows)} "):
        stream.read_rows(np.array([len(files.rows)]))


def test_a_stream_goes_on_with_further_shards(tmp_path: Path) -> None:
    files = written(tmp_path, [([2, 3], False)])
    stream = files.stream()
    assert stream.read_windows(np.array([0]), 5)[1] is None
    files.add([4], True)
    stream.extend(Shards.from_shards(files.shards[1:]))
    assert (stream.tokens, stream.examples) == (9, 3)
    ids, masks = stream.read_windows(np.array([4]), 5)
    assert ids[0].tolist() == [files.rows[1][2], *files.rows[2]]
    assert masks is not None
    assert masks[0].tolist() == [True, *map(bool, files.masks[2])]
    assert stream.read_rows(np.array([2]))[0][0].tolist() == files.rows[2]


def test_no_token_is_looked_for_in_an_empty_shard(tmp_path: Path) -> None:
    files = written(tmp_path, [([2], False), ([3], False)])
    empty = Shard(file="train/none.arrow", tokens=0, documents=0, bytes=0, sha256="", ids_offset=0)
    stream = files.stream([empty, files.shards[0], empty, files.shards[1], empty])
    assert stream.read_windows(np.array([0]), 5)[0][0].tolist() == files.rows[0] + files.rows[1]
    assert [row.tolist() for row in stream.read_rows(np.array([1, 0]))[0]] == [files.rows[1], files.rows[0]]
    nothing = files.stream([])
    assert (nothing.tokens, nothing.examples, nothing.remote_shards) == (0, 0, None)
    assert [each.tolist() for each in nothing.read_heads()] == [[], []]
