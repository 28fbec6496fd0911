"""Piece indexes written by many ranks: the found pieces fill the targets, and few files are read."""

import gc
import hashlib
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.train.checkpoint import index
from raystride.pipelines.train.checkpoint.index import (
    FIRST_BATCH,
    ReadRegions,
    _rank_batches,
    _without_gc,
    encode_table,
    find_pieces,
    hash_name,
    index_file_name,
    to_dcp_metadata,
)
from tests.some import some

SIZES = st.lists(st.integers(1, 12), max_size=3).map(tuple)


class Part(torch.Tensor):
    """A tensor of which a range of rows is here, as PyTorch asks one for it."""

    begin: tuple[int, ...]
    part: tuple[int, ...]

    @staticmethod
    def rows_of_size(whole: tuple[int, ...], rows: range) -> "Part":
        """Returns some rows of a tensor of that size; all of a scalar."""
        found = torch.Tensor._make_subclass(Part, torch.zeros(whole))
        found.begin = (rows.start, *[0] * (len(whole) - 1)) if whole else ()
        found.part = (len(rows), *whole[1:]) if whole else ()
        return found

    def __create_chunk_list__(self) -> list[Any]:
        return [ChunkStorageMetadata(torch.Size(self.begin), torch.Size(self.part))]


def rows_of(count: int, rank: int, world: int) -> range:
    """The rows of a rank where they are cut as PyTorch cuts them."""
    part = -(-count // world)
    return range(min(rank * part, count), min((rank + 1) * part, count))


def write(folder: Path, tensors: dict[str, tuple[int, ...]], world: int, order: list[int]) -> dict[str, Any]:
    """The files of a checkpoint by rows, where rank `order[i]` has the i-th rows; its manifest."""
    files = []
    for place, rank in enumerate(order):
        rows: list[tuple[list[int], Any, Any]] = []
        for name, size in tensors.items():
            part = rows_of(size[0], place, world) if size else range(place == 0)
            if part:
                begin = (part.start, *[0] * (len(size) - 1)) if size else ()
                rows.append(([hash_name(name), 4 * len(rows), 4], begin, (len(part), *size[1:]) if size else ()))
        if rows:
            files.append(f"d/rank-{rank}.npy")
            Folder(str(folder)).put(files[-1], encode_table(rows))
    stated = {name: {"dtype": "float32", "size": list(size)} for name, size in tensors.items()}
    return {"world": world, "files": dict.fromkeys(files), "tensors": stated}


def times_held(pieces: list[Any], size: tuple[int, ...]) -> np.ndarray:
    """Returns how often each element of a tensor is in one of the pieces."""
    counts = np.zeros(size, int)
    for piece in pieces:
        counts[tuple(slice(a, a + n) for a, n in zip(piece["offsets"], piece["sizes"], strict=True))] += 1
    return counts


@given(
    tensors=st.dictionaries(st.sampled_from("abcdef"), SIZES, min_size=1),
    writers=st.integers(1, 8),
    readers=st.integers(1, 8),
    shuffled=st.randoms(use_true_random=False),
)
def test_what_is_found_holds_what_is_wanted_and_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, Any], writers: int, readers: int, shuffled: Any
) -> None:
    folder, order = tmp_path_factory.mktemp("pieces"), list(range(writers))
    shuffled.shuffle(order)  # as ranks of a mesh have them
    manifest = write(folder, tensors, writers, order)
    for rank in range(readers):
        parts = {name: rows_of(size[0], rank, readers) if size else range(1) for name, size in tensors.items()}
        targets = {name: Part.rows_of_size(size, parts[name]) for name, size in tensors.items()}
        found = find_pieces(Folder(str(folder)), manifest, "d", rank, targets)
        for name, size in some(tensors.items()):
            counts = times_held(found[name], size)
            assert counts.max() <= 1
            assert counts[parts[name].start : parts[name].stop].all() if size else counts == 1
            for piece in found[name]:
                assert not size or piece["offsets"][0] < parts[name].stop
                assert not size or piece["offsets"][0] + piece["sizes"][0] > parts[name].start


@pytest.mark.parametrize(("readers", "most"), [(64, 1), (32, 2), (128, 1), (1, 64)])
def test_a_rank_reads_the_files_of_those_that_had_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, readers: int, most: int
) -> None:
    tensors = {f"t{number}": (128 * number, 3) for number in range(1, 9)}
    manifest = write(tmp_path, tensors, 64, list(range(64)))
    read, plain = [], index._read_table

    def count_reads(folder: Folder, name: str) -> np.ndarray:
        read.append(name)
        return plain(folder, name)

    monkeypatch.setattr(index, "_read_table", count_reads)
    for rank in (0, readers // 2, readers - 1):
        read.clear()
        targets = {name: Part.rows_of_size(size, rows_of(size[0], rank, readers)) for name, size in tensors.items()}
        find_pieces(Folder(str(tmp_path)), manifest, "d", rank, targets)
        assert len(read) <= most + 1  # with a rank's own number, which may be another's rows


def test_files_of_earlier_versions_are_read(tmp_path: Path) -> None:
    targets = {"t": Part.rows_of_size((6, 2), range(2, 5))}
    manifest = write(tmp_path, {"t": (6, 2)}, 3, [0, 1, 2])
    found = find_pieces(Folder(str(tmp_path)), manifest, "d", 1, targets)
    files = {}
    for rank in range(3):
        (tmp_path / f"d/rank-{rank}.npy").unlink()
        piece = {"offsets": [2 * rank, 0], "sizes": [2, 2], "offset": 0, "bytes": 4}
        (tmp_path / f"d/rank-{rank}.json").write_text(json.dumps({"t": [piece]}))
        files |= {f"d/rank-{rank}.json": None, f"d/rank-{rank}.bin": None}
    assert find_pieces(Folder(str(tmp_path)), manifest | {"files": files}, "d", 1, targets) == found
    assert [piece["file"] for piece in found["t"]] == ["d/rank-1.bin", "d/rank-2.bin"]


def test_a_name_has_the_first_64_bits_of_its_hash() -> None:
    digest = hashlib.blake2b(b"blocks.0.norm1.weight", digest_size=8).digest()
    assert hash_name("blocks.0.norm1.weight") == np.frombuffer(digest, "<i8")[0]
    assert index_file_name("d", 12) == "d/rank-12.npy"


def test_a_table_has_a_row_a_piece_filled_up_for_those_with_fewer_dimensions() -> None:
    content = encode_table([([7, 8, 9], (1, 2), (3, 4)), ([4, 5, 6], (), ()), ([1, 2, 3], (5,), (6,))])
    found = np.load(io.BytesIO(content))
    assert found.tolist() == [[7, 8, 9, 1, 2, 3, 4], [4, 5, 6, 0, 0, 1, 1], [1, 2, 3, 5, 0, 6, 1]]
    assert np.load(io.BytesIO(encode_table([]))).shape == (0, 3)


def test_likely_files_come_first_and_then_the_nearest_ever_more_at_once() -> None:
    ranks = list(range(0, 1000, 2))
    first, *others = _rank_batches({3, 4, 10}, 400, ranks)
    assert first == [4, 10]
    assert [len(wave) for wave in others] == [FIRST_BATCH, 2 * FIRST_BATCH, 4 * FIRST_BATCH, 498 - 7 * FIRST_BATCH]
    distances = [abs(rank - 400) for wave in others for rank in wave]
    assert distances == sorted(distances)
    assert sorted([*first, *(rank for wave in others for rank in wave)]) == ranks
    assert list(_rank_batches(set(), 0, [])) == [[]]


@given(rows=st.integers(1, 40), world=st.integers(1, 9), readers=st.integers(1, 9), data=st.data())
def test_likely_ranks_are_those_that_have_the_rows_if_they_are_cut_evenly(
    rows: int, world: int, readers: int, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, readers - 1))
    own = rows_of(rows, rank, readers)
    if not own:
        return
    regions = ReadRegions({"t": {"size": [rows, 2], "dtype": "float32"}}, {"t": Part.rows_of_size((rows, 2), own)})
    assert regions.num_elements == 2 * len(own)
    having = {writer for writer in range(world) if set(rows_of(rows, writer, world)) & set(own)}
    assert regions.likely_ranks(world, rank) == having | {rank}


def test_nothing_but_scalars_is_likely_in_the_ranks_own_file() -> None:
    regions = ReadRegions({"s": {"size": [], "dtype": "float32"}}, {"s": torch.zeros(())})
    assert (regions.num_elements, regions.likely_ranks(8, 5)) == (1, {5})
    assert ReadRegions({}, {"t": torch.zeros(2)}).likely_ranks(8, 3) == {3}, (
        "what the checkpoint does not have is not looked for"
    )


def test_pieces_of_a_manifest_need_no_file(tmp_path: Path) -> None:
    chunks = [{"offsets": [0], "sizes": [2], "file": "d/rank-0.bin", "offset": 0, "bytes": 8}]
    manifest = {"tensors": {"t": {"size": [2], "dtype": "float32", "chunks": chunks}}, "files": {"d/rank-0.bin": None}}
    assert find_pieces(Folder(str(tmp_path)), manifest, "d", 0, {"t": torch.zeros(2)}) == {"t": chunks}


def test_metadata_is_as_pytorch_has_it() -> None:
    pieces = {"t": [{"offsets": [0, 0], "sizes": [2, 3]}, {"offsets": [2, 0], "sizes": [1, 3]}]}
    found = to_dcp_metadata({"t": {"size": [3, 3], "dtype": "bfloat16"}}, pieces).state_dict_metadata["t"]
    assert (found.size, found.properties.dtype) == (torch.Size((3, 3)), torch.bfloat16)  # type: ignore[union-attr]
    chunks = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in found.chunks]  # type: ignore[union-attr]
    assert chunks == [((0, 0), (2, 3)), ((2, 0), (1, 3))]


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_is_collected_afterwards_if_it_was_before(enabled: bool) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with _without_gc():
            assert not gc.isenabled()
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()
