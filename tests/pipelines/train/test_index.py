"""Where pieces lie, written by many ranks: what is found fills what is wanted, and few files are read for it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from raystride.pipelines.files import Folder
from raystride.pipelines.train import index
from raystride.pipelines.train.index import key_of, pieces_of, table_of
from tests.some import some

SIZES = st.lists(st.integers(1, 12), max_size=3).map(tuple)


class Part(torch.Tensor):
    """A tensor of which a range of rows is here, as PyTorch asks one for it."""

    begin: tuple[int, ...]
    part: tuple[int, ...]

    @staticmethod
    def of(whole: tuple[int, ...], rows: range) -> "Part":
        """Some rows of a tensor of that size; of a scalar all there is."""
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
                rows.append(([key_of(name), 4 * len(rows), 4], begin, (len(part), *size[1:]) if size else ()))
        if rows:
            files.append(f"d/rank-{rank}.npy")
            Folder(str(folder)).put(files[-1], table_of(rows))
    stated = {name: {"dtype": "float32", "size": list(size)} for name, size in tensors.items()}
    return {"world": world, "files": dict.fromkeys(files), "tensors": stated}


def held(pieces: list[Any], size: tuple[int, ...]) -> np.ndarray:
    """How often each number of a tensor is in one of the pieces."""
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
        wanted = {name: Part.of(size, parts[name]) for name, size in tensors.items()}
        found = pieces_of(Folder(str(folder)), manifest, "d", rank, wanted)
        for name, size in some(tensors.items()):
            counts = held(found[name], size)
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
    read, plain = [], index._read

    def counted(folder: Folder, name: str) -> np.ndarray:
        read.append(name)
        return plain(folder, name)

    monkeypatch.setattr(index, "_read", counted)
    for rank in (0, readers // 2, readers - 1):
        read.clear()
        wanted = {name: Part.of(size, rows_of(size[0], rank, readers)) for name, size in tensors.items()}
        pieces_of(Folder(str(tmp_path)), manifest, "d", rank, wanted)
        assert len(read) <= most + 1  # with a rank's own number, which may be another's rows


def test_files_of_earlier_versions_are_read(tmp_path: Path) -> None:
    wanted = {"t": Part.of((6, 2), range(2, 5))}
    manifest = write(tmp_path, {"t": (6, 2)}, 3, [0, 1, 2])
    found = pieces_of(Folder(str(tmp_path)), manifest, "d", 1, wanted)
    files = {}
    for rank in range(3):
        (tmp_path / f"d/rank-{rank}.npy").unlink()
        piece = {"offsets": [2 * rank, 0], "sizes": [2, 2], "offset": 0, "bytes": 4}
        (tmp_path / f"d/rank-{rank}.json").write_text(json.dumps({"t": [piece]}))
        files |= {f"d/rank-{rank}.json": None, f"d/rank-{rank}.bin": None}
    assert pieces_of(Folder(str(tmp_path)), manifest | {"files": files}, "d", 1, wanted) == found
    assert [piece["file"] for piece in found["t"]] == ["d/rank-1.bin", "d/rank-2.bin"]
